"""Loading of a rank's micro-batches: of each step, from a position of the run on; on their devices.

The random numbers drawn while a micro-batch is loaded depend only on its place in the run: the
generators are seeded for each micro-batch, on whatever rank or in whatever process loads it.

Map-style datasets are read by sample number, optionally by worker processes. Iterable datasets are
read from beginning to end in their own order: each rank reads all samples and keeps the samples of
its micro-batches, so the global batch does not depend on the world size.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.buckets import SampleBuckets
from hvdtrain.data.config import BatchConfig, LoaderConfig
from hvdtrain.data.order import Order, build_order, specification_of
from hvdtrain.errors import UnsupportedTaskError, UserError
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.device import seed_all
from hvdtrain.runtime.heartbeat import Activity

Batch = Any  # result of collate: tensors, or dicts and tuples of them
_POSITIONS_AT_ONCE = 1024
# Timeout of a rank for a worker; the same as for a collective that another rank does not join.
_WORKER_SECONDS = 900.0
_PR_SET_PDEATHSIG = 1  # https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
# The last part of a seed separates uses of random numbers. A forward pass in training has no such
# part.
VALIDATION_SEED, _EPOCH_SEED, _LOADING_SEED = 1, 2, 3


@dataclass(frozen=True)
class Loading:
    """Options for loading batches, in training and evaluation.

    Args:
        config: processes that load ahead; none for an iterable dataset.
        pin_memory: copy batches into page-locked memory, for CUDA.
        collate: makes a batch of samples.
    """

    config: LoaderConfig = field(default_factory=LoaderConfig)
    pin_memory: bool = False
    collate: Callable[[list[Any]], Any] = default_collate


IN_RANK = Loading()


class TrainLoader:
    """The micro-batches of this rank, step by step, from a position of the run onwards.

    Step s of a run takes the next `global_size` samples of the order, micro-batch after
    micro-batch; with buckets, it takes the next micro-batches of the buckets. Ranks may have
    different numbers of micro-batches, or none.

    Args:
        dataset: at least one sample; map-style, or iterable with its own order. `loading.config`
            and a mixture determine the order of a map-style dataset, see order.py.
        samples: start position in the order, in samples since the run's first.
        batch: sizes of a step and of a micro-batch.
        assignment: which micro-batches belong to this rank; read again in each step.
        seed: the run's seed.
        buckets: samples of each micro-batch, with batch.max_tokens; not for iterable datasets.
        replayed: returns, for a step and the micro-batches per rank, the number of another rank's
            micro-batch that this rank loads before its own; None: none. For map-style datasets.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        samples: int,
        batch: BatchConfig,
        assignment: Assignment,
        seed: int,
        loading: Loading = IN_RANK,
        buckets: SampleBuckets | None = None,
        replayed: Callable[[int, Sequence[int]], int | None] = lambda step, counts: None,
    ) -> None:
        self._dataset = dataset
        self._samples = samples
        self._replayed = replayed
        self._global_size = batch.global_size
        self._micro_size = batch.micro_size
        self._micro_batches = batch.micro_batches
        self._seed = seed
        self._loading = loading
        self._buckets = buckets
        self._order: Order | None = None  # of a map-style dataset without buckets
        self.assignment = assignment
        self._own_order = has_own_order(dataset)
        self._batches: Iterator[Batch] = iter(())
        self._assigned: list[int] | None = None
        if not self._own_order and buckets is None:
            specification = specification_of(dataset, loading.config)
            self._order = build_order(specification, seed, batch.global_size)
        if has_own_order(dataset):
            batches = IterableBatches(dataset, samples, batch, assignment, seed, loading.collate)
            pin_memory = loading.pin_memory
            self._batches = iter(DataLoader(batches, batch_size=None, pin_memory=pin_memory))

    def next_step(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches of the next step, in the order of `assignment`.

        A replayed micro-batch comes first.

        Random numbers are seeded before each micro-batch is loaded and, for a map-style dataset,
        again before the forward pass: the numbers drawn depend on the position in the run, and
        not on the process that loads.

        Args:
            step: its number in the run, from 0.

        Raises:
            UnsupportedTaskError: on each rank, an iterable dataset is shorter than its length.
            UserError: a sample cannot be loaded.
        """
        if not self._own_order and self._assigned != self.assignment.counts:
            # Prefetched micro-batches belong to the previous assignment.
            self._assigned = list(self.assignment.counts)
            self._batches = self._begin(step)
        self._samples += self._global_size
        if not self._own_order:
            for j in self._numbers(step):
                batch = next(self._batches)
                if isinstance(batch, UserError):
                    raise batch
                seed_all(self._seed, step, j)
                yield batch
            return
        for j in range(self._micro_batches):  # reading passes those of the other ranks, too
            seed_all(self._seed, step, j)
            batch = next(self._batches)
            if j in self.assignment:
                yield batch

    def load(self, step: int, number: int, samples: int) -> Batch:
        """Load any micro-batch of a map-style dataset now, and seed its forward pass.

        Args:
            number: its number in the step.
            samples: position in the order at which the step begins.

        Raises:
            UserError: a sample cannot be loaded.
        """
        if self._buckets is not None:
            chosen = self._buckets.micro_batch(step * self._micro_batches + number)
        else:
            assert self._order is not None
            start = samples + number * self._micro_size
            chosen = self._order.samples(start, start + self._micro_size).tolist()
        place = Place(step, number, chosen)
        batch = self._micro_batches_by_place()[place]
        if isinstance(batch, UserError):
            raise batch
        seed_all(self._seed, step, number)
        return batch

    def go_back(self, samples: int) -> None:
        """Begin the next step at this position again; not for an iterable dataset."""
        self._samples, self._assigned = samples, None

    def close(self) -> None:
        """End the loader processes."""
        self._batches = iter(())

    def _begin(self, step: int) -> Iterator[Batch]:
        self.close()
        places = (
            self._places(step, self._samples)
            if self._buckets is None
            else self._places_of_buckets(step, self._buckets)
        )
        return load(self._micro_batches_by_place(), places, self._loading)

    def _micro_batches_by_place(self) -> MicroBatches:
        return MicroBatches(self._dataset, self._seed, _LOADING_SEED, self._loading.collate)

    def _numbers(self, step: int) -> list[int]:
        """Numbers of the micro-batches that this rank loads in a step, in order."""
        replayed = self._replayed(step, self.assignment.counts)
        return [*(() if replayed is None else (replayed,)), *self.assignment]

    def _places_of_buckets(self, step: int, buckets: SampleBuckets) -> Iterator[Place]:
        """Same as `_places`, for buckets."""
        for number in count(step) if len(self.assignment) else ():
            for j in self._numbers(number):
                yield Place(number, j, buckets.micro_batch(number * self._micro_batches + j))

    def _places(self, step: int, position: int) -> Iterator[Place]:
        """Endless places of a rank's micro-batches from a step on; empty if it has none.

        Args:
            position: in the order, at which the step begins.
        """
        assert self._order is not None
        # Several steps at once: the computation takes as long for 32 positions as for 1024.
        steps = max(1, _POSITIONS_AT_ONCE // self._global_size)
        if not len(self.assignment):
            return
        numbers = count(step)
        for start in count(position, steps * self._global_size):
            samples = self._order.samples(start, start + steps * self._global_size)
            for micro_batches in samples.reshape(steps, -1, self._micro_size).tolist():
                number = next(numbers)
                for j in self._numbers(number):
                    yield Place(number, j, micro_batches[j])


# --- map-style datasets -------------------------------------------------------


class Place(NamedTuple):
    """A micro-batch: its step in the run, its number in the step, and its samples."""

    step: int
    number: int
    samples: Sequence[int]


class MicroBatches(Dataset[Batch]):
    """Micro-batches by place; the random numbers drawn in loading depend only on the place."""

    def __init__(
        self, dataset: Dataset[Any], seed: int, kind: int, collate: Callable[[list[Any]], Any]
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._kind = kind
        self._collate = collate

    def __getitem__(self, place: Place) -> Batch | UserError:
        """The micro-batch, or the error: raised in a worker, it would become a traceback."""
        seed_all(self._seed, place.step, place.number, self._kind)
        try:
            return self._collate(read_samples(self._dataset, place.samples))
        except UserError as error:
            return error


def read_samples(dataset: Dataset[Any], indices: Sequence[int]) -> list[Any]:
    """The samples of a map-style dataset, read together if the dataset can do that."""
    several = getattr(dataset, "__getitems__", None)
    if several is None:
        return [dataset[index] for index in indices]
    samples: list[Any] = several(indices)
    return samples


def load(batches: MicroBatches, places: Iterable[Place], loading: Loading) -> Iterator[Batch]:
    workers = loading.config.workers
    return iter(
        DataLoader(
            batches,
            sampler=places,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=workers,
            timeout=_WORKER_SECONDS if workers else 0.0,
            prefetch_factor=loading.config.prefetch if workers else None,
            worker_init_fn=begin_worker,
            pin_memory=loading.pin_memory,
        )
    )


def _as_it_is(batch: Batch) -> Batch:
    return batch


def begin_worker(number: int) -> None:
    """Make the worker exit with its rank, however the rank exits, and ignore the rank's signals.

    Otherwise it would hold the lock on the run directory and the exporter's port for seconds.
    """
    rank = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank:
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for ignored in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)


# --- iterable datasets --------------------------------------------------------


def has_own_order(dataset: object) -> TypeGuard[IterableDataset[Any]]:
    """Whether the dataset is iterable, without access to samples by number."""
    return isinstance(dataset, IterableDataset)


class IterableBatches(IterableDataset[Any]):
    """Endless micro-batches of a run from a position on: None for other ranks' micro-batches.

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
        seed_all(self._seed, epoch, 0, _EPOCH_SEED)
        return iter(self._dataset)


def take(samples: Iterator[Any], number: int, dataset: IterableDataset[Any]) -> Any:
    """The next sample of an iteration over `dataset`, which has returned `number` samples so far.

    Raises:
        UnsupportedTaskError: the iteration has ended before the dataset's length.
    """
    for sample in samples:
        return sample
    raise UnsupportedTaskError(
        f"the dataset {type(dataset).__name__} ended after {number} samples, but its __len__() "
        f"says {len(dataset)}: it must be the number of samples of each iteration"  # type: ignore[arg-type]
    )


# --- devices ------------------------------------------------------------------


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
