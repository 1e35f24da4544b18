"""Where a rank's time goes: phases that are disjoint, and whose sum is the wall time.

On the CPU a phase ends when the next one is entered, by the clock. On CUDA the host only hands
out work, so an event is put into the stream at each change of phase, and its time is read when
the device has passed it, a step later as a rule: nothing is ever waited for.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hvdtrain.runtime.grid import WAITED

PHASES = (
    "data",
    "forward",
    "backward",
    "comm_exposed",
    "optimizer",
    "eval",
    "checkpoint",
    "other",
)


_PASSES = ("forward", "backward")

Seconds = dict[str, float]


class Event(Protocol):
    """What PhaseTimer needs of a torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this one to a later one; both were passed."""


@dataclass
class Bubble:
    """What the ranks of a pipeline wait for each other in training, by the host's clock.

    Args:
        schedule_seconds: in schedules so far.
        expected: sum over their steps of the fraction that a rank would wait where all stages
            were as fast, and
        steps: how many these were.
    """

    schedule_seconds: float = 0.0
    expected: float = 0.0
    steps: int = 0

    @property
    def formula(self) -> float:
        """The mean of what was expected; NaN: there is no pipeline."""
        return self.expected / self.steps if self.steps else math.nan


class PhaseTimer:
    """Splits the time of one process into `PHASES`.

    One thread enters phases; any thread may read.

    Args:
        began: time.perf_counter() from which on time counts; so far it was "other".

    Attributes:
        waited: axis of `WAITED` -> seconds for which this rank has waited for the others of its
            replica, transfers included, by the host's clock: so little of it on GPUs.
        waited_in_passes: those of these that lie in forward and backward.
        bubble: with a pipeline.
    """

    def __init__(self, began: float) -> None:
        # (phase, since when, seconds of each phase before): one tuple, replaced at once, so
        # that a reader in another thread needs no lock and sees no half of a change.
        self._state = ("other", began, (0.0,) * len(PHASES))
        self._event: Callable[[], Event] | None = None
        self._listeners: tuple[Callable[[str], None], ...] = ()
        # Phases that the device has not left yet, with the event at their beginning.
        self._pending: deque[tuple[str, Event]] = deque()
        self.waited = dict.fromkeys(WAITED, 0.0)
        self.waited_in_passes = 0.0
        self.bubble = Bubble()

    def use_events(self, event: Callable[[], Event]) -> None:
        """From now on time is the device's; `event` puts one into its stream."""
        self.enter(self.phase)
        self._pending.append((self.phase, event()))
        self._event = event

    def listen(self, listener: Callable[[str], None]) -> None:
        """From now on `listener` is told of each phase just before it is entered."""
        self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Callable[[str], None]) -> None:
        """It is not told any more."""
        self._listeners = tuple(other for other in self._listeners if other != listener)

    @property
    def phase(self) -> str:
        """What time counts as now."""
        return self._pending[-1][0] if self._pending else self._state[0]

    def enter(self, phase: str) -> None:
        """Time counts as `phase` from now on."""
        for listener in self._listeners:
            listener(phase)
        if self._event is None:
            self._change(phase, time.perf_counter())
            return
        self._pending.append((phase, self._event()))
        while len(self._pending) > 1 and self._pending[1][1].query():
            begin = self._pending.popleft()[1]
            phase, end = self._pending[0]
            self._change(phase, self._state[1] + begin.elapsed_time(end) / 1000)

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Time counts as `phase` inside, and afterwards as what it did before."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def waiting(self, axis: str) -> Iterator[None]:
        """Time inside is waited for the other ranks of an axis; its phase stays what it is."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.waited[axis] += seconds
            if self.phase in _PASSES:
                self.waited_in_passes += seconds

    def seconds(self) -> Seconds:
        """Of each phase since the beginning; with events, as far as the device has got."""
        state = self._state
        passed = state[2] if self._event else _passed(state, time.perf_counter())
        return dict(zip(PHASES, passed, strict=True))

    def _change(self, phase: str, now: float) -> None:
        self._state = (phase, now, _passed(self._state, now))


def cuda_event() -> torch.cuda.Event:
    """An event in the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _passed(state: tuple[str, float, tuple[float, ...]], now: float) -> tuple[float, ...]:
    phase, since, passed = state
    index = PHASES.index(phase)
    return (*passed[:index], passed[index] + now - since, *passed[index + 1 :])
