"""Which micro-batches a rank works on, and loading them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hvdtrain.data.config import BatchConfig
from hvdtrain.data.order import sample_order
from hvdtrain.runtime.mesh import Group
from hvdtrain.runtime.rng import seed_all

_POSITIONS_AT_ONCE = 1024
# Tells the seeding of validation batches from that of training, whose keys have no such part.
_EVALUATION = 1

Batch = Any  # what default_collate makes of samples: tensors, or dicts and tuples of them


class TrainLoader:
    """The micro-batches of this rank, step by step, from a position of the run onwards.

    Step s of a run takes the next `global_size` samples of the order; micro-batch j of
    the step goes to rank j % world_size. A rank may have fewer than another, or none.

    Args:
        dataset: map-style, at least one sample.
        samples: position in the order to start at, in samples since the run's first.
        batch: samples of a step and of a micro-batch.
        group: the data axis; who works on which micro-batch.
        seed: the run's seed.
        pin_memory: copy batches into page-locked memory, for CUDA.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        samples: int,
        batch: BatchConfig,
        group: Group,
        seed: int,
        pin_memory: bool = False,
    ) -> None:
        self._dataset = dataset
        self._samples = samples
        self._global_size = batch.global_size
        self._micro_size = batch.micro_size
        self._seed = seed
        self.local_micro_batches = range(group.rank, batch.micro_batches, group.size)
        self._batches: Iterator[Batch] = iter(
            DataLoader(
                dataset,
                batch_sampler=self._batch_sampler(),
                pin_memory=pin_memory,
            )
        )

    def _batch_sampler(self) -> Iterator[list[int]]:
        size = len(self._dataset)  # type: ignore[arg-type]
        # Several steps at once: the arithmetic costs the same for 32 positions as for 1024.
        steps = max(1, _POSITIONS_AT_ONCE // self._global_size)
        for start in count(self._samples, steps * self._global_size):
            order = sample_order(start, start + steps * self._global_size, size, self._seed)
            for step in order.reshape(steps, -1, self._micro_size).tolist():
                for j in self.local_micro_batches:
                    yield step[j]

    def next_step(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches of the next step, in the order of `local_micro_batches`.

        Random numbers are seeded before each is loaded: what a data set draws for a sample
        follows from the place in the run too, as dropout does.

        Args:
            step: its number in the run, from 0.
        """
        for j in self.local_micro_batches:
            seed_all(self._seed, step, j)
            yield next(self._batches)


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
    """
    samples = min(samples, len(dataset))  # type: ignore[arg-type]
    batches = range(-(-samples // micro_size))
    for number in batches[group.rank :: group.size]:
        start = number * micro_size
        stop = min(start + micro_size, samples)
        seed_all(seed, 0, number, _EVALUATION)
        yield stop - start, default_collate([dataset[i] for i in range(start, stop)])


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
