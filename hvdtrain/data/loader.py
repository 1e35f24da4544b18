"""Which micro-batches a rank works on, and loading them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hvdtrain.data.config import BatchConfig
from hvdtrain.data.deal import Deal
from hvdtrain.data.iterable import IterableBatches, has_own_order, take
from hvdtrain.data.order import sample_order
from hvdtrain.runtime.mesh import Group
from hvdtrain.runtime.rng import seed_all

_POSITIONS_AT_ONCE = 1024
# Tells the seeding of validation batches from that of training, whose keys have no such part.
_EVALUATION = 1

Batch = Any  # what default_collate makes of samples: tensors, or dicts and tuples of them


class TrainLoader:
    """The micro-batches of this rank, step by step, from a position of the run onwards.

    Step s of a run takes the next `global_size` samples of the order, micro-batch after
    micro-batch. A rank may have fewer than another, or none.

    Args:
        dataset: at least one sample; map-style, or iterable, whose order is its own.
        samples: position in the order to start at, in samples since the run's first.
        batch: samples of a step and of a micro-batch.
        deal: which micro-batches are this rank's; read anew in each step.
        seed: the run's seed.
        pin_memory: copy batches into page-locked memory, for CUDA.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        samples: int,
        batch: BatchConfig,
        deal: Deal,
        seed: int,
        pin_memory: bool = False,
    ) -> None:
        self._dataset = dataset
        self._samples = samples
        self._global_size = batch.global_size
        self._micro_size = batch.micro_size
        self._seed = seed
        self.deal = deal
        self._read: Collection[int] = deal
        loader: DataLoader[Any]
        if has_own_order(dataset):
            # Who reads it comes by the others' micro-batches too.
            self._read = range(batch.micro_batches)
            batches = IterableBatches(dataset, samples, batch, deal, seed)
            loader = DataLoader(batches, batch_size=None, pin_memory=pin_memory)
        else:
            sampler = self._batch_sampler()
            loader = DataLoader(dataset, batch_sampler=sampler, pin_memory=pin_memory)
        self._batches: Iterator[Batch] = iter(loader)

    def _batch_sampler(self) -> Iterator[list[int]]:
        size = len(self._dataset)  # type: ignore[arg-type]
        # Several steps at once: the arithmetic costs the same for 32 positions as for 1024.
        steps = max(1, _POSITIONS_AT_ONCE // self._global_size)
        for start in count(self._samples, steps * self._global_size):
            order = sample_order(start, start + steps * self._global_size, size, self._seed)
            for step in order.reshape(steps, -1, self._micro_size).tolist():
                for j in self.deal:
                    yield step[j]

    def next_step(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches of the next step, in the order of `deal`.

        Random numbers are seeded before each is loaded: what a data set draws for a sample
        follows from the place in the run too, as dropout does.

        Args:
            step: its number in the run, from 0.

        Raises:
            UnsupportedTaskError: on each rank, an iterable data set is shorter than its length.
        """
        for j in self._read:
            seed_all(self._seed, step, j)
            batch = next(self._batches)
            if j in self.deal:
                yield batch


def validation_batches(
    dataset: Dataset[Any],
    samples: int,
    micro_size: int,
    group: Group,
    seed: int,
) -> Iterator[tuple[int, Batch]]:
    """This rank's share of the first `samples` of the data: (samples in the batch, batch).

    Random numbers are seeded before each batch is loaded, from the run's seed and the batch's
    place in the data alone: neither the number of ranks nor the step changes what is drawn.

    Raises:
        UnsupportedTaskError: on each rank, an iterable data set is shorter than its length.
    """
    batches = range(-(-samples // micro_size))
    own = batches[group.rank :: group.size]
    rest: Iterator[Any] = iter(())
    for number in batches if has_own_order(dataset) else own:
        place = range(number * micro_size, min((number + 1) * micro_size, samples))
        seed_all(seed, 0, number, _EVALUATION)
        if has_own_order(dataset):
            rest = rest if number else iter(dataset)
            batch = [take(rest, i, dataset) for i in place]
        else:
            batch = [dataset[i] for i in place]
        if number in own:
            yield len(place), default_collate(batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Moves the tensors of a batch; on the CPU nothing is copied."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
