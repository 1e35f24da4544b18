"""Iterable datasets: each rank reads them from beginning to end, in the dataset's own order.

A rank reads all samples and keeps the samples of its micro-batches, so the global batch does not
depend on the world size. The position after a step is the same on all ranks, and a function of the
step alone. It is part of the run's state. If the dataset has `state_dict()` and `load_state_dict()`
(the protocol of torchdata's StatefulDataLoader), so is its state after the last step, and a run
that resumes reads on from there. Otherwise it reads the pass again from its beginning, and passes
over the samples before.

At each start, and at the beginning of each pass of known length, the ranks compare the first
samples: a dataset that divides or shuffles itself gives each rank other ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from hashlib import sha256
from inspect import signature
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import IterableDataset, default_convert

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import AHEAD, BatchConfig
from hvdtrain.data.loader import (
    EPOCH_SEED,
    IN_RANK,
    LOADING_SEED,
    VALIDATION_SEED,
    Batch,
    Loading,
    StepLoader,
    has_own_order,
    start_loading,
)
from hvdtrain.data.sample_facts import SampleFacts, Values
from hvdtrain.data.samples import parts_of, values_of
from hvdtrain.errors import UnsupportedTaskError, UserError
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.device import seed_all
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.runtime.plain_values import decode, encode, json_of, with_json
from hvdtrain.runtime.state_part import Scope

Stream = Iterable[Any]  # see has_own_order
_COMPARED = 16  # samples
_PASSING_SECONDS = 1.0  # between two signs of a reader that passes over samples


def has_state(dataset: object) -> bool:
    """Whether a dataset with its own order can save its position, and continue there."""
    return (
        has_own_order(dataset)
        and _takes(dataset, "state_dict")
        and _takes(dataset, "load_state_dict", {})
        and not _shuffles_in_a_buffer(dataset)
    )


def _takes(dataset: object, name: str, *arguments: object) -> bool:
    method = getattr(dataset, name, None)
    if not callable(method):
        return False
    try:
        signature(method).bind(*arguments)
    except TypeError:  # such as litdata's, which need numbers that only its own loader has
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _shuffles_in_a_buffer(dataset: object) -> bool:
    """Whether it is a stream of Hugging Face's datasets with a shuffle buffer.

    Its state does not have the samples in the buffer, which would be lost.
    """
    # A private name: tests with such streams notice if it changes.
    name = "BufferShuffledExamplesIterable"
    return any(type(one).__name__ == name for _, one in parts_of(dataset))


def length_of(dataset: object) -> int | None:
    """The number of samples of an epoch; None if the dataset does not know it."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        return None


# --- position -----------------------------------------------------------------


class Position(NamedTuple):
    """A position between two samples of a dataset.

    Args:
        samples: read since the run's start.
        epoch: number of the pass over the data, from 0.
        read: samples read in this pass.
        state: the dataset's state_dict(), as JSON; see runtime/plain_values.py. None: it has none.
        tensors: the tensors in it.
        begun: without a state: a digest of integers and texts in the first samples of this pass.
    """

    samples: int
    epoch: int
    read: int
    state: Any
    tensors: Mapping[str, Tensor]
    begun: str = ""

    @classmethod
    def of(
        cls,
        dataset: Any,
        stateful: bool,
        samples: int = 0,
        epoch: int = 0,
        read: int = 0,
        begun: str = "",
    ) -> Position:
        """The current position of a dataset; `stateful`: see `has_state`.

        Raises:
            UserError: the state holds something that cannot be saved.
        """
        tensors: dict[str, Tensor] = {}
        if not stateful:
            return cls(samples, epoch, read, None, tensors, begun)
        name = f"the state_dict() of the dataset {type(dataset).__name__}"
        state = encode(dataset.state_dict(), name, tensors)
        return cls(samples, epoch, read, state, tensors)

    @classmethod
    def first(cls, dataset: Any) -> Position:
        """The position of a dataset that was not read yet; raises what `of` raises."""
        found = cls.of(dataset, stateful := has_state(dataset))
        if stateful:
            # torchdata's Loader ignores a state that it gets between state_dict() and iter().
            iter(dataset)
        return found


class StreamState:
    """The replicated part "data_position": the position after the last step that counts.

    Args:
        first: position at the start of the run; None: as the dataset was built.
    """

    name = "data_position"
    scope: Scope = "replicated"

    def __init__(self, first: Position | None) -> None:
        self._first = self._position = first
        # Once they are handed out, they are the position: others may write to them.
        self._tensors: dict[str, Tensor] | None = None

    @property
    def position(self) -> Position | None:
        """None: the start of the run."""
        if self._tensors is None:
            return self._position
        if not self._tensors:
            return None
        samples, epoch, read, state, *begun = json_of(self._tensors)
        return Position(samples, epoch, read, state, self._tensors, *begun)

    def keep(self, position: Position) -> None:
        self._position, self._tensors = position, None

    def tensors(self) -> dict[str, Tensor]:
        """See StatePart; none at the start of the run, if it is the state of the built dataset."""
        if self._tensors is None:
            self._tensors = {}
            if self._position is not None:
                *content, tensors, begun = self._position
                self._tensors = with_json([*content, *([begun] if begun else [])], tensors)
        return self._tensors

    def compared(self) -> dict[str, Tensor]:
        """See StatePart."""
        return self.tensors()

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """See StatePart; the next loader begins there."""
        self._position, self._tensors = self._first, None
        if saved:
            [tensors] = saved
            self._tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}


# --- reading ------------------------------------------------------------------


class StreamLoader(StepLoader):
    """This rank's micro-batches of an iterable dataset, from a position of the run onwards.

    With loader.workers one process reads ahead: several would each have to read all samples.

    Args:
        dataset: see `has_own_order`.
        samples: start position, in samples since the run's first; a step begins there.
        batch: sizes of a step and of a micro-batch.
        seed: the run's seed.
        state: the dataset's position: the loader begins there and updates it.
    """

    def __init__(
        self,
        dataset: Stream,
        samples: int,
        batch: BatchConfig,
        assignment: Assignment,
        seed: int,
        state: StreamState,
        loading: Loading = IN_RANK,
    ) -> None:
        self.assignment = assignment
        self._dataset = dataset
        self._samples = samples
        self._batch = batch
        self._seed = seed
        self._loading = loading
        self._state = state
        self._items: Iterator[_Item | UserError | None] = iter(())
        self._assigned: list[int] | None = None
        self._reached: Position | None = None  # after the step in progress
        self._first: dict[str, Values] = {}  # samples to compare, read in the step in progress

    def next_step(self, step: int) -> Iterator[Batch]:
        counts = self.assignment.counts
        # What a process has read ahead belongs to the previous assignment.
        if self._assigned is None or (self._loading.config.workers and self._assigned != counts):
            self._items = self._begin(step)
        self._assigned = list(counts)
        self._first = {}
        return self._micro_batches(step)

    def _micro_batches(self, step: int) -> Iterator[Batch]:
        for j in self.assignment:
            batch = self._take().batch
            seed_all(self._seed, step, j)
            yield batch

    def end_step(self) -> SampleFacts | None:
        if self._reached is None:
            self._take()  # this rank has no micro-batch
        return SampleFacts(self._first) if self._first else None

    def go_back(self, samples: int) -> None:
        self._samples, self._assigned, self._reached = samples, None, None

    def advance(self) -> None:
        self._samples += self._batch.global_size
        if self._reached is not None:
            self._state.keep(self._reached)
            self._reached = None

    @property
    def passes(self) -> float:
        position = self._state.position
        return float(position.epoch) if position is not None else 0.0

    def close(self) -> None:
        self._items = iter(())

    def _take(self) -> _Item:
        while (item := next(self._items)) is None:
            heartbeat.HEARTBEAT.beat(Activity.WORKING)
        if isinstance(item, UserError):
            raise item
        self._reached = item.reached
        self._first |= item.first
        return item

    def _begin(self, step: int) -> Iterator[_Item | UserError | None]:
        self.close()
        loading = self._loading
        start = _Start(step, self._samples, self._state.position)
        reader = _Reader(
            self._dataset, self._batch, self._seed, loading.collate, start, self.assignment
        )
        config = loading.config
        if not config.workers and not loading.pin_memory:
            return map(default_convert, reader)  # what a DataLoader does, without its overhead
        ahead = AHEAD * config.workers
        return start_loading(reader, loading, min(config.workers, 1), ahead)


class _Item(NamedTuple):
    """What a reader reads at a time.

    Args:
        batch: None: this rank has none in the step.
        reached: with a step's last item, the position after the step.
        first: with a step's last item, samples to compare, by their number in the run.
    """

    batch: Batch | None
    reached: Position | None
    first: dict[str, Values]


class _Start(NamedTuple):
    """Where a reader begins.

    Args:
        step: number of the first step.
        samples: read before it, since the run's start.
        position: of the dataset; None, or at the start of the run: it is unknown, unless `samples`
            is 0.
    """

    step: int
    samples: int
    position: Position | None


class _Reader(IterableDataset[Any]):
    """Endless micro-batches of a run, read in order, pass after pass over the dataset.

    There is an item for each of this rank's micro-batches, or one per step if it has none. An item
    may also be a UserError: raised in a worker, it would become a traceback. None says that the
    reader passes over samples.

    Args:
        own: numbers of this rank's micro-batches in a step.
    """

    def __init__(
        self,
        dataset: Any,
        batch: BatchConfig,
        seed: int,
        collate: Callable[[list[Any]], Batch],
        start: _Start,
        own: Container[int],
    ) -> None:
        self._dataset = dataset
        self._batch = batch
        self._seed = seed
        self._collate = collate
        # Of a dataset without a state, samples beyond its length are left out.
        self._stateful = has_state(dataset)
        self._start = start
        self._own = own
        self._name = type(dataset).__name__
        self._size = length_of(dataset)
        self._samples = self._epoch = self._read = 0
        self._first: Position | None = None  # to load before the first pass
        self._pass: Iterator[Any] | None = None  # None: the next sample begins a pass
        self._to_compare = 0  # number of the next samples that the ranks compare
        self._compared: dict[str, Values] = {}
        self._begun = ""  # see Position
        self._expected: Position | None = None  # whose `begun` this pass must have

    def __iter__(self) -> Iterator[Any]:
        batch = self._batch
        try:
            yield from self._begin()
            self._to_compare, self._compared = _COMPARED, {}
            for step in count(self._start.step):
                last: Batch | None = None
                for j in range(batch.micro_batches):
                    self._seed_for(step, j)
                    samples = self._take(batch.micro_samples)
                    own = self._collate(samples) if j in self._own else None
                    if own is not None:
                        if last is not None:
                            yield _Item(last, None, {})
                        last = own
                place = self._samples, self._epoch, self._read
                compared, self._compared = self._compared, {}
                reached = Position.of(self._dataset, self._stateful, *place, self._begun)
                yield _Item(last, reached, compared)
        except UserError as error:
            yield error

    def _begin(self) -> Iterator[None]:
        """Go to the start, and yield on the way.

        If the dataset's position there is unknown, it is read from the beginning of the epoch.
        """
        _, samples, position = self._start
        if position is not None and position.samples:
            if position.samples > samples:
                raise RuntimeError(
                    f"the data is at sample {position.samples}, the run at {samples}"
                )
            self._samples, self._epoch, self._read = position[:3]
            if position.state is None or not self._stateful:
                # The pass is read again. It begins with its first sample, as before: an __iter__
                # that is a generator draws random numbers only then.
                self._samples, self._read = self._samples - self._read, 0
                self._expected = position
            else:
                self._begin_pass(position)
            yield from self._read_until(samples)
            return
        self._first = position
        if not samples:
            return
        if self._size is None:
            raise UserError(
                f"the dataset {self._name} has no length, and its position after {samples} samples "
                "was not saved: the run cannot continue there"
            )
        self._epoch, read = divmod(samples, self._size)
        self._samples = samples - read
        yield from self._read_until(samples)

    def _read_until(self, samples: int) -> Iterator[None]:
        said = time.monotonic()
        while self._samples < samples:
            number, begun = divmod(self._samples, self._batch.micro_samples)
            if not begun:
                self._seed_for(*divmod(number, self._batch.micro_batches))
            self._take(min(self._batch.micro_samples - begun, samples - self._samples))
            if time.monotonic() > said + _PASSING_SECONDS:
                said = time.monotonic()
                yield None

    def _seed_for(self, step: int, number: int) -> None:
        seed_all(self._seed, step, number, LOADING_SEED)

    def _begin_pass(self, position: Position | None) -> None:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
        if self._size is not None:  # else the ranks may begin it in different steps
            self._to_compare = _COMPARED
        if position is not None and position.state is not None and self._stateful:
            self._dataset.load_state_dict(decode(position.state, position.tensors))
        self._begun = ""
        seed_all(self._seed, self._epoch, 0, EPOCH_SEED)
        self._pass = iter(self._dataset)

    def _take(self, count: int) -> list[Any]:
        """The next samples, from as many passes as needed."""
        found: list[Any] = []
        while len(found) < count:
            wanted = count - len(found)
            if self._size is not None and not self._stateful:
                wanted = min(wanted, self._size - self._read)  # the samples beyond are left out
            if self._pass is None:
                self._begin_pass(self._first)
                self._first = None
            assert self._pass is not None
            taken = _next(self._pass, wanted)
            found += taken
            self._note(taken)
            self._read += len(taken)
            self._samples += len(taken)
            if self._size is not None and self._read > self._size:
                raise self._wrong_length(f"has more than {self._size} samples")
            ended = len(taken) < wanted
            if ended and self._size is not None and self._read != self._size:
                raise self._wrong_length(f"ended after {self._read} samples")
            if ended and not self._read:
                raise UnsupportedTaskError(
                    f"the dataset {self._name} has no samples in epoch {self._epoch}: after the "
                    "end of a pass, iter() must begin the next one"
                )
            if ended or (self._read == self._size and not self._stateful):
                self._end_pass()
        return found

    def _note(self, samples: Sequence[Any]) -> None:
        for number, sample in enumerate(samples):
            of_pass = not self._stateful and self._read + number < _COMPARED
            if not of_pass and number >= self._to_compare:
                break
            values: Values = {}
            with suppress(Exception):  # whatever a property of a sample raises
                values = values_of(sample)
            if number < self._to_compare:  # also without values: all ranks compare, or none
                self._compared[str(self._samples + number)] = values
            if of_pass:
                exact = sorted((place, v) for place, v in values.items() if v < 0)
                self._begun = sha256(f"{self._begun} {exact}".encode()).hexdigest()[:8]
            self._check_begun(self._read + number + 1)
        self._to_compare = max(0, self._to_compare - len(samples))

    def _check_begun(self, read: int) -> None:
        """Check a pass that is read again, at the position until which `begun` was computed."""
        before = self._expected
        if (
            before is None
            or self._stateful
            or not before.begun
            or read != min(before.read, _COMPARED)
        ):
            return
        self._expected = None
        if self._begun != before.begun:
            raise UserError(
                f"the dataset {self._name} begins pass {self._epoch} with other samples than "
                f"before, so it cannot continue after sample {before.read} of it: give its "
                "shuffle a seed, or begin another run.id"
            )

    def _end_pass(self) -> None:
        self._epoch += 1
        self._read, self._pass = 0, None

    def _wrong_length(self, what: str) -> UnsupportedTaskError:
        return UnsupportedTaskError(
            f"the dataset {self._name} {what}, but its __len__() says {self._size}: it must be the "
            "number of samples of each iteration"
        )


def _next(samples: Iterator[Any], most: int) -> list[Any]:
    """The next samples, fewer at the end.

    By next() alone, as `for` does: a dataset that is its own iterator begins again at each iter(),
    which islice() and zip() call.
    """
    found: list[Any] = []
    with suppress(StopIteration):
        while len(found) < most:
            found.append(next(samples))
    return found


# --- validation ---------------------------------------------------------------


def read_validation(
    dataset: Any,
    places: Sequence[Sequence[int]],
    own: Container[int],
    seed: int,
    collate: Callable[[list[Any]], Batch],
) -> Iterator[Batch]:
    """This rank's micro-batches of the first samples; the dataset's state is as before afterwards.

    Args:
        places: the samples of each micro-batch, in order.
        own: numbers of this rank's micro-batches.

    Raises:
        UnsupportedTaskError: on each rank, the dataset is shorter than its length.
    """
    before = deepcopy(dataset.state_dict()) if has_state(dataset) else None
    rest: Iterator[Any] = iter(())
    for number, place in enumerate(places):
        seed_all(seed, 0, number, VALIDATION_SEED)
        rest = rest if number else iter(dataset)
        batch = _next(rest, len(place))
        if len(batch) < len(place):
            raise UnsupportedTaskError(
                f"the dataset {type(dataset).__name__} ended after {place[0] + len(batch)} "
                f"samples, but its __len__() says {len(dataset)}: it must be the number of samples "
                "of each iteration"
            )
        if number in own:
            yield collate(batch)
    if before is not None:
        dataset.load_state_dict(before)
