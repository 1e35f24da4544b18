"""Iterable datasets: read from beginning to end, in their own order.

Each rank reads all samples and keeps those of its micro-batches, so the global batch does not
depend on the world size. The random numbers that a dataset draws from torch, numpy or random depend
only on the position in the run: the generators are seeded at the start of each epoch and of each
micro-batch, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from itertools import count, islice
from typing import Any, TypeGuard

from torch.utils.data import IterableDataset

from hvdtrain.data.config import BatchConfig
from hvdtrain.errors import UnsupportedTaskError
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.device import seed_all
from hvdtrain.runtime.heartbeat import Activity

# Separates the seeds of an epoch's start from those of micro-batches, whose keys have no such part.
_EPOCH = 2


def has_own_order(dataset: object) -> TypeGuard[IterableDataset[Any]]:
    """Whether the dataset is iterable, without access to samples by number."""
    return isinstance(dataset, IterableDataset)


class IterableBatches(IterableDataset[Any]):
    """Endless micro-batches of a run from a position on: None for those of other ranks.

    Args:
        samples: start position, in samples since the run's first; a step begins there.
        own: numbers of this rank's micro-batches in a step.
        seed: the run's seed.
        collate: makes a micro-batch of samples.

    Iterating raises UnsupportedTaskError if the dataset has fewer samples than its length.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        samples: int,
        batch: BatchConfig,
        own: Container[int],
        seed: int,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._collate = collate
        self._dataset = dataset
        self._start = samples
        self._batch = batch
        self._own = own
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        samples = self._samples()
        while True:
            for j in range(self._batch.micro_batches):
                micro_batch = list(islice(samples, self._batch.micro_size))
                yield self._collate(micro_batch) if j in self._own else None

    def _samples(self) -> Iterator[Any]:
        """Samples from the start position on; earlier samples of its epoch are read and dropped.

        The consumer of a later sample must have seeded the generators for its micro-batch.
        """
        size = len(self._dataset)  # type: ignore[arg-type]
        micro_size, micro_batches = self._batch.micro_size, self._batch.micro_batches
        samples: Iterator[Any] = iter(())
        for position in count(self._start - self._start % size):
            if position <= self._start and position % micro_size == 0:
                seed_all(self._seed, *divmod(position // micro_size, micro_batches))
                heartbeat.HEARTBEAT.beat(Activity.WORKING)
            if position % size == 0:
                samples = self._begin(position // size)
            sample = take(samples, position % size, self._dataset)
            if position >= self._start:
                yield sample

    def _begin(self, epoch: int) -> Iterator[Any]:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        seed_all(self._seed, epoch, 0, _EPOCH)
        return iter(self._dataset)


def take(samples: Iterator[Any], number: int, dataset: IterableDataset[Any]) -> Any:
    """The next sample of an iteration over `dataset`, which has returned `number` samples so far.

    Raises:
        UnsupportedTaskError: the iteration has ended before the dataset's length.
    """
    for sample in samples:
        return sample
    raise UnsupportedTaskError(
        f"the data set {type(dataset).__name__} ended after {number} samples, but its __len__() "
        f"says {len(dataset)}: it must be the number of samples of each iteration"  # type: ignore[arg-type]
    )
