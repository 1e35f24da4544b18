"""Check that each epoch uses each sample exactly once, by arithmetic and from the permutation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdtrain.data.buckets import Buckets
from hvdtrain.data.order import Indices, permute

# Positions whose samples are computed: takes about a second.
LIMIT = 1 << 21


@dataclass(frozen=True)
class OrderCheck:
    """Positions `start`..`stop`-1 of the run, over epochs of `size` samples.

    Args:
        checked: number of positions in the interval whose sample was computed
        repeated: epochs in which two of these positions have the same sample, or in which a sample
            is not in the data
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
    """Compute the samples of up to about `limit` positions and look for repetitions.

    If there are more positions, check evenly spaced epochs, and evenly spaced positions in each of
    them.

    Args:
        start, stop: positions of the run, stop not included.
        size: samples in the dataset, >= 1.
        seed: the seed of the run.
    """
    epochs = range(start // size, -(-stop // size))
    spread = epochs[:: -(-len(epochs) * min(size, limit) // limit) or 1]
    checked, repeated = 0, []
    for epoch in spread:
        first, last = max(start, epoch * size), min(stop, (epoch + 1) * size)
        positions = np.arange(first, last, -(-(last - first) // limit) or 1, dtype=np.int64)
        samples = permute(positions - epoch * size, size, seed, epoch)
        if _repeats(samples, size):
            repeated.append(epoch)
        checked += len(positions)
    return OrderCheck(start, stop, size, checked, repeated)


def check_buckets(start: int, stop: int, buckets: Buckets, limit: int = LIMIT) -> OrderCheck:
    """Check samples that are grouped by length, as `check_order` does.

    Args:
        start, stop: positions of micro-batches in the run, stop not included.
    """
    epochs = range(start // len(buckets), -(-stop // len(buckets)))
    spread = epochs[:: -(-len(epochs) * min(buckets.samples, limit) // limit) or 1]
    checked, repeated = 0, []
    for epoch in spread:
        begin = epoch * len(buckets)
        first, last = max(start, begin), min(stop, begin + len(buckets))
        every = -(-(last - first) * buckets.samples // (limit * len(buckets))) or 1
        places = buckets.places(np.arange(first, last, every, dtype=np.int64) - begin, epoch)
        if _repeats(places, buckets.samples):
            repeated.append(epoch)
        checked += len(places)
    samples = buckets.samples_before(start), buckets.samples_before(stop)
    return OrderCheck(*samples, buckets.samples, checked, repeated)


def _repeats(samples: Indices, size: int) -> bool:
    inside = ((samples >= 0) & (samples < size)).all()
    return not inside or len(np.unique(samples)) < len(samples)
