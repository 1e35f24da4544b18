"""Does each epoch use each sample exactly once? Arithmetic, and a look at the permutation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdtrain.data.order import permute

# Positions whose samples are computed: a second or so.
LIMIT = 1 << 21


@dataclass(frozen=True)
class OrderCheck:
    """Positions `start`..`stop`-1 of the run, over epochs of `size` samples.

    Args:
        checked: positions whose sample was computed, of all in the interval
        repeated: epochs in which two of these positions have the same sample, or one that the
            data does not have
    """

    start: int
    stop: int
    size: int
    checked: int
    repeated: list[int]

    @property
    def epochs(self) -> float:
        return self.stop / self.size

    @property
    def all_checked(self) -> bool:
        return self.checked == self.stop - self.start


def check_order(start: int, stop: int, size: int, seed: int, limit: int = LIMIT) -> OrderCheck:
    """Computes the samples of up to about `limit` positions and looks for repetitions.

    Where there are more positions, evenly spaced epochs are looked at, and in each evenly
    spaced positions.

    Args:
        start, stop: positions of the run, stop not included.
        size: samples in the data set, >= 1.
        seed: the run's.
    """
    epochs = range(start // size, -(-stop // size))
    spread = epochs[:: -(-len(epochs) * min(size, limit) // limit) or 1]
    checked, repeated = 0, []
    for epoch in spread:
        first, last = max(start, epoch * size), min(stop, (epoch + 1) * size)
        positions = np.arange(first, last, -(-(last - first) // limit) or 1, dtype=np.int64)
        samples = permute(positions - epoch * size, size, seed, epoch)
        inside = ((samples >= 0) & (samples < size)).all()
        if not inside or len(np.unique(samples)) < len(samples):
            repeated.append(epoch)
        checked += len(positions)
    return OrderCheck(start, stop, size, checked, repeated)
