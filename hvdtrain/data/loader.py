"""Which micro-batches a rank works on, and loading them, in processes of their own if asked to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hvdtrain.data.config import BatchConfig, LoaderConfig
from hvdtrain.data.deal import Deal
from hvdtrain.data.iterable import IterableBatches, has_own_order, take
from hvdtrain.data.order import sample_order
from hvdtrain.data.worker import begin_worker
from hvdtrain.errors import UserError
from hvdtrain.runtime.mesh import Group
from hvdtrain.runtime.rng import seed_all

_POSITIONS_AT_ONCE = 1024
# Tell the seeding of validation batches, and of loading a micro-batch, from that of a forward
# pass in training, whose keys have no such part. (2 is an epoch's start, see iterable.py.)
_EVALUATION, _LOADING = 1, 3
# For which a rank waits for a worker, as for a collective in which another takes no part.
_WORKER_SECONDS = 900.0

Batch = Any  # what default_collate makes of samples: tensors, or dicts and tuples of them


class _Place(NamedTuple):
    """A micro-batch: its step in the run, its number in the step, and its samples."""

    step: int
    number: int
    samples: Sequence[int]


class _MicroBatches(Dataset[Batch]):
    """Micro-batches by their place; what loading one draws follows from that place alone."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, place: _Place) -> Batch | UserError:
        """The micro-batch; or the error, which a worker that raises makes a traceback of."""
        seed_all(self._seed, place.step, place.number, _LOADING)
        try:
            several = getattr(self._dataset, "__getitems__", None)
            if several is not None:
                return default_collate(several(place.samples))
            return default_collate([self._dataset[index] for index in place.samples])
        except UserError as error:
            return error


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
        config: processes that load ahead; none for an iterable data set.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        samples: int,
        batch: BatchConfig,
        deal: Deal,
        seed: int,
        pin_memory: bool = False,
        config: LoaderConfig | None = None,
    ) -> None:
        self._dataset = dataset
        self._samples = samples
        self._global_size = batch.global_size
        self._micro_size = batch.micro_size
        self._seed = seed
        self._pin_memory = pin_memory
        self._config = config or LoaderConfig()
        self.deal = deal
        self._own_order = has_own_order(dataset)
        # Who reads an iterable data set comes by the others' micro-batches too.
        self._read: Collection[int] = range(batch.micro_batches) if self._own_order else deal
        self._batches: Iterator[Batch] = iter(())
        self._dealt: list[int] | None = None
        if has_own_order(dataset):
            batches = IterableBatches(dataset, samples, batch, deal, seed)
            self._batches = iter(DataLoader(batches, batch_size=None, pin_memory=pin_memory))

    def next_step(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches of the next step, in the order of `deal`.

        Random numbers are seeded before each is loaded and, for a data set with an index, once
        more before the forward pass: what either draws follows from the place in the run, and not
        from which process loads.

        Args:
            step: its number in the run, from 0.

        Raises:
            UnsupportedTaskError: on each rank, an iterable data set is shorter than its length.
            UserError: a sample cannot be loaded.
        """
        if not self._own_order and self._dealt != self.deal.counts:
            # What was loaded ahead is of another deal.
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
        """Ends the processes that load."""
        self._batches = iter(())

    def _begin(self, step: int) -> Iterator[Batch]:
        self.close()
        workers = self._config.workers
        return iter(
            DataLoader(
                _MicroBatches(self._dataset, self._seed),
                sampler=self._places(step, self._samples, [*self.deal]),
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=workers,
                timeout=_WORKER_SECONDS if workers else 0.0,
                prefetch_factor=self._config.prefetch if workers else None,
                worker_init_fn=begin_worker,
                pin_memory=self._pin_memory,
            )
        )

    def _places(self, step: int, position: int, own: Sequence[int]) -> Iterator[_Place]:
        """Of a rank's micro-batches from a step on, without end; of none, nothing.

        Args:
            position: in the order, where the step begins.
            own: numbers of its micro-batches in each step.
        """
        size = len(self._dataset)  # type: ignore[arg-type]
        # Several steps at once: the arithmetic costs the same for 32 positions as for 1024.
        steps = max(1, _POSITIONS_AT_ONCE // self._global_size)
        if not own:
            return
        numbers = count(step)
        for start in count(position, steps * self._global_size):
            order = sample_order(start, start + steps * self._global_size, size, self._seed)
            for micro_batches in order.reshape(steps, -1, self._micro_size).tolist():
                number = next(numbers)
                for j in own:
                    yield _Place(number, j, micro_batches[j])


def _as_it_is(batch: Batch) -> Batch:
    return batch


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
