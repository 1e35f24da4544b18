"""Loading of a rank's micro-batches of each step, from a position of the run onwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hvdtrain.data.buckets import SampleBuckets
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.deal import Deal
from hvdtrain.data.iterable import IterableBatches, has_own_order
from hvdtrain.data.loading import IN_RANK, Batch, Loading, MicroBatches, Place, load
from hvdtrain.data.order import sample_order
from hvdtrain.errors import UserError
from hvdtrain.runtime.device import seed_all

_POSITIONS_AT_ONCE = 1024
# Separates the seeds of loading a micro-batch from those of a forward pass, whose keys have no such
# part. (1 is a validation batch, see validation.py; 2 is an epoch's start, see iterable.py.)
_LOADING = 3


class TrainLoader:
    """The micro-batches of this rank, step by step, from a position of the run onwards.

    Step s of a run takes the next `global_size` samples of the order, micro-batch after
    micro-batch; with buckets, it takes the next micro-batches of the buckets. Ranks may have
    different numbers of micro-batches, or none.

    Args:
        dataset: at least one sample; map-style, or iterable with its own order.
        samples: start position in the order, in samples since the run's first.
        batch: sizes of a step and of a micro-batch.
        deal: which micro-batches belong to this rank; read again in each step.
        seed: the run's seed.
        buckets: samples of each micro-batch, with batch.max_tokens; not for iterable datasets.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        samples: int,
        batch: BatchConfig,
        deal: Deal,
        seed: int,
        loading: Loading = IN_RANK,
        buckets: SampleBuckets | None = None,
    ) -> None:
        self._dataset = dataset
        self._samples = samples
        self._global_size = batch.global_size
        self._micro_size = batch.micro_size
        self._micro_batches = batch.micro_batches
        self._seed = seed
        self._loading = loading
        self._buckets = buckets
        self.deal = deal
        self._own_order = has_own_order(dataset)
        # Reading an iterable dataset passes the micro-batches of the other ranks, too.
        self._read: Collection[int] = range(batch.micro_batches) if self._own_order else deal
        self._batches: Iterator[Batch] = iter(())
        self._dealt: list[int] | None = None
        if has_own_order(dataset):
            batches = IterableBatches(dataset, samples, batch, deal, seed, loading.collate)
            pin_memory = loading.pin_memory
            self._batches = iter(DataLoader(batches, batch_size=None, pin_memory=pin_memory))

    def next_step(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches of the next step, in the order of `deal`.

        Random numbers are seeded before each micro-batch is loaded and, for a map-style dataset,
        again before the forward pass: the numbers drawn depend on the position in the run, and
        not on the process that loads.

        Args:
            step: its number in the run, from 0.

        Raises:
            UnsupportedTaskError: on each rank, an iterable dataset is shorter than its length.
            UserError: a sample cannot be loaded.
        """
        if not self._own_order and self._dealt != self.deal.counts:
            # Prefetched micro-batches belong to the previous assignment.
            self._dealt = list(self.deal.counts)
            self._batches = self._begin(step)
        self._samples += self._global_size
        for j in self._read:
            if self._own_order:
                seed_all(self._seed, step, j)
            batch = next(self._batches)
            if isinstance(batch, UserError):
                raise batch
            if j in self.deal:
                if not self._own_order:
                    seed_all(self._seed, step, j)
                yield batch

    def close(self) -> None:
        """End the loader processes."""
        self._batches = iter(())

    def _begin(self, step: int) -> Iterator[Batch]:
        self.close()
        loading, own = self._loading, [*self.deal]
        places = (
            self._places(step, self._samples, own)
            if self._buckets is None
            else self._places_of_buckets(step, own, self._buckets)
        )
        batches = MicroBatches(self._dataset, self._seed, _LOADING, loading.collate)
        return load(batches, places, loading)

    def _places_of_buckets(
        self, step: int, own: Sequence[int], buckets: SampleBuckets
    ) -> Iterator[Place]:
        """Same as `_places`, for buckets."""
        for number in count(step) if own else ():
            for j in own:
                yield Place(number, j, buckets.micro_batch(number * self._micro_batches + j))

    def _places(self, step: int, position: int, own: Sequence[int]) -> Iterator[Place]:
        """Endless places of a rank's micro-batches from a step on; empty if it has none.

        Args:
            position: in the order, at which the step begins.
            own: numbers of its micro-batches in each step.
        """
        size = len(self._dataset)  # type: ignore[arg-type]
        # Several steps at once: the computation takes as long for 32 positions as for 1024.
        steps = max(1, _POSITIONS_AT_ONCE // self._global_size)
        if not own:
            return
        numbers = count(step)
        for start in count(position, steps * self._global_size):
            order = sample_order(start, start + steps * self._global_size, size, self._seed)
            for micro_batches in order.reshape(steps, -1, self._micro_size).tolist():
                number = next(numbers)
                for j in own:
                    yield Place(number, j, micro_batches[j])


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch to a device; no copy on the CPU."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
