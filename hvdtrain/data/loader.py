"""Loading of a rank's micro-batches: of each step, from a position of the run on; on their devices.

The random numbers drawn while a micro-batch is loaded depend only on its place in the run: the
generators are seeded for each micro-batch, on whatever rank or in whatever process loads it.

Map-style datasets are read by sample number, optionally by worker processes; stream.py reads
iterable datasets, which have their own order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.buckets import SampleBuckets
from hvdtrain.data.config import AHEAD, BatchConfig, LoaderConfig
from hvdtrain.data.order import Order, build_order, specification_of
from hvdtrain.data.sample_facts import SampleFacts
from hvdtrain.data.workers import WorkerContext, begin, check_socket_paths
from hvdtrain.errors import UserError
from hvdtrain.runtime.device import seed_all

Batch = Any  # result of collate: tensors, or dicts and tuples of them
_POSITIONS_AT_ONCE = 1024
# Timeout of a rank for a worker; the same as for a collective that another rank does not join.
_WORKER_SECONDS = 900.0
# The last part of a seed separates uses of random numbers. A forward pass in training has no such
# part.
VALIDATION_SEED, EPOCH_SEED, LOADING_SEED = 1, 2, 3
# Of a script's own loop: at the beginning of a step, after its micro-batches, after its block, for
# each part of an evaluation, and for the update.
STEP_SEED, BLOCK_SEED, AFTER_SEED, EVALUATE_SEED, UPDATE_SEED = 4, 5, 6, 7, 8


@dataclass(frozen=True)
class Loading:
    """Options for loading batches, in training and evaluation.

    Args:
        config: processes that load ahead.
        pin_memory: copy batches into page-locked memory, for CUDA.
        collate: makes a batch of samples.
        observe: called with the samples of each micro-batch of training, where it is loaded.
    """

    config: LoaderConfig = field(default_factory=LoaderConfig)
    pin_memory: bool = False
    collate: Callable[[list[Any]], Any] = default_collate
    observe: Callable[[Place, Sequence[Any]], None] | None = None


IN_RANK = Loading()


class StepLoader(ABC):
    """The micro-batches of this rank, step by step.

    Attributes:
        assignment: which micro-batches belong to this rank; read again in each step.
    """

    assignment: Assignment

    @abstractmethod
    def next_step(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches of the next step, in the order of `assignment`.

        Random numbers are seeded before each micro-batch is loaded, and again before the forward
        pass: the numbers drawn depend on the position in the run, and not on the process that
        loads.

        Args:
            step: its number in the run, from 0.

        Raises:
            UnsupportedTaskError: on each rank, an iterable dataset does not have its length.
            UserError: a sample cannot be loaded.
        """

    def end_step(self) -> SampleFacts | None:
        """Called after the passes of a step, before it counts; raises what `next_step` raises.

        Returns:
            What the ranks have to compare, because each of them has read the same samples of an
            iterable dataset; None, on all ranks: nothing.
        """
        return None

    def advance(self) -> None:
        """Called when a step counts."""
        return

    @abstractmethod
    def go_back(self, samples: int) -> None:
        """Begin the next step, which is repeated, at this position of the run."""

    @property
    def passes(self) -> float:
        """Completed passes over data whose length is unknown."""
        return 0.0

    @abstractmethod
    def close(self) -> None:
        """End the loader processes."""


class TrainLoader(StepLoader):
    """The micro-batches of this rank, step by step, from a position of the run onwards.

    Step s of a run takes the next `global_size` samples of the order, micro-batch after
    micro-batch; with buckets, it takes the next micro-batches of the buckets. Ranks may have
    different numbers of micro-batches, or none.

    Args:
        dataset: at least one sample, map-style; it and `loading.config` determine the order, see
            order.py.
        samples: start position in the order, in samples since the run's first.
        batch: sizes of a step and of a micro-batch.
        assignment: see StepLoader.
        seed: the run's seed.
        buckets: samples of each micro-batch, with batch.max_tokens.
        replayed: returns, for a step and the micro-batches per rank, the number of another rank's
            micro-batch that this rank loads before its own; None: none.
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
        self._micro_size = batch.micro_samples
        self._micro_batches = batch.micro_batches
        self._seed = seed
        self._loading = loading
        self._buckets = buckets
        self._order: Order | None = None  # without buckets
        self.assignment = assignment
        self._batches: Iterator[Batch] = iter(())
        self._assigned: list[int] | None = None
        if buckets is None:
            specification = specification_of(dataset, loading.config)
            self._order = build_order(specification, seed, batch.global_size)

    def next_step(self, step: int) -> Iterator[Batch]:
        if self._assigned != self.assignment.counts:
            # Prefetched micro-batches belong to the previous assignment.
            self._assigned = list(self.assignment.counts)
            self._batches = self._begin(step)
        self._samples += self._global_size
        for j in self._numbers(step):
            batch = next(self._batches)
            if isinstance(batch, UserError):
                raise batch
            seed_all(self._seed, step, j)
            yield batch

    def load(self, step: int, number: int, samples: int) -> Batch:
        """Load any micro-batch now, and seed its forward pass.

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
        self._samples, self._assigned = samples, None

    def close(self) -> None:
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
        loading = self._loading
        return MicroBatches(
            self._dataset, self._seed, LOADING_SEED, loading.collate, loading.observe
        )

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
        self,
        dataset: Dataset[Any],
        seed: int,
        kind: int,
        collate: Callable[[list[Any]], Any],
        observe: Callable[[Place, Sequence[Any]], None] | None = None,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._kind = kind
        self._collate = collate
        self._observe = observe

    def __getitem__(self, place: Place) -> Batch | UserError:
        """The micro-batch, or the error: raised in a worker, it would become a traceback."""
        seed_all(self._seed, place.step, place.number, self._kind)
        try:
            samples = read_samples(self._dataset, place.samples)
            if self._observe is not None:
                self._observe(place, samples)
            return self._collate(samples)
        except UserError as error:
            return error


def read_samples(dataset: Dataset[Any], indices: Sequence[int]) -> list[Any]:
    """The samples of a map-style dataset, read together if the dataset can do that."""
    several = getattr(dataset, "__getitems__", None)
    if several is None:
        return [dataset[index] for index in indices]
    samples: list[Any] = several(indices)
    return samples


def load(batches: Dataset[Any], places: Iterable[Any], loading: Loading) -> Iterator[Batch]:
    workers, ahead = loading.config.workers, AHEAD
    if not workers and not loading.pin_memory:
        return map(batches.__getitem__, places)  # what a DataLoader does, without its overhead
    options = {"sampler": places, "collate_fn": _as_it_is}
    return start_loading(batches, loading, workers, ahead, **options)


def start_loading(
    batches: Dataset[Batch], loading: Loading, workers: int, ahead: int, **options: Any
) -> Iterator[Any]:
    """Load micro-batches, in worker processes or in this process.

    Args:
        batches: its samples are micro-batches; a UserError in place of one is the rank's.
        workers: number of processes; 0: this process.
        ahead: micro-batches that each of them loads ahead.
        options: of DataLoader.

    Raises:
        UserError: the worker processes could not send what they load.
    """
    if workers:
        check_socket_paths()
        options |= {
            "timeout": _WORKER_SECONDS,
            "prefetch_factor": ahead,
            "multiprocessing_context": WorkerContext(),
            "worker_init_fn": begin,
        }
    return iter(
        DataLoader(
            batches,
            batch_size=None,
            num_workers=workers,
            pin_memory=loading.pin_memory,
            **options,
        )
    )


def _as_it_is(batch: Batch) -> Batch:
    return batch


def has_own_order(dataset: object) -> TypeGuard[Iterable[Any]]:
    """Whether the dataset is iterable, without access to samples by number; see stream.py.

    Some libraries' IterableDatasets, such as those of mosaicml-streaming and litdata, have both a
    length and access by number: they are read by number.
    """
    by_number = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
    if isinstance(dataset, IterableDataset):
        return by_number is Dataset.__getitem__ or not hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


# --- devices ------------------------------------------------------------------


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch to a device; no copy on the CPU."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):  # such as a PackedSequence, or a batch of graphs
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
