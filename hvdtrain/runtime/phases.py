"""Breakdown of a rank's time into disjoint phases, whose sum is the wall time.

On the CPU a phase ends when the next one is entered, by the clock. On CUDA the host only enqueues
work, so an event is recorded in the stream at each phase change. Its time is read after the device
has passed it, usually a step later: the timer never waits.
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

from hvdtrain.runtime.mesh import WAITED

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

_PLACES = {phase: place for place, phase in enumerate(PHASES)}
_PASSES = ("forward", "backward")

Seconds = dict[str, float]


class Event(Protocol):
    """Methods of torch.cuda.Event that PhaseTimer uses."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this event to a later one; the device has passed both."""


@dataclass
class Bubble:
    """Time for which the ranks of a pipeline wait for each other in training, by the host's clock.

    Args:
        schedule_seconds: seconds in schedules so far.
        expected: sum over the steps of the expected bubble fraction: the fraction of time for
            which a rank would wait if all stages were equally fast.
        steps: number of these steps.
    """

    schedule_seconds: float = 0.0
    expected: float = 0.0
    steps: int = 0

    @property
    def formula(self) -> float:
        """Mean of the expected bubble fraction; NaN: there is no pipeline."""
        return self.expected / self.steps if self.steps else math.nan


class PhaseTimer:
    """Splits the time of one process into `PHASES`.

    One thread enters phases; any thread may read.

    Args:
        began: time.perf_counter() from which time counts; until the first phase it is "other".

    Attributes:
        waited: axis of `WAITED` -> seconds for which this rank has waited for other ranks of its
            replica, transfers included. Measured by the host's clock, so small on GPUs.
        waited_in_passes: seconds of `waited` inside forward and backward.
        bubble: with a pipeline.
    """

    def __init__(self, began: float) -> None:
        # (phase, start of the phase, seconds of each phase before): one tuple, replaced at once,
        # so that a reader in another thread needs no lock and sees no partial change.
        self._state = ("other", began, (0.0,) * len(PHASES))
        self._event: Callable[[], Event] | None = None
        self._listeners: tuple[Callable[[str], None], ...] = ()
        # Phases that the device has not left yet, with the event at their start.
        self._pending: deque[tuple[str, Event]] = deque()
        self.waited = dict.fromkeys(WAITED, 0.0)
        self.waited_in_passes = 0.0
        self.bubble = Bubble()

    def use_events(self, event: Callable[[], Event]) -> None:
        """Measure time on the device from now on; `event` records an event in its stream."""
        self.enter(self.phase)
        self._pending.append((self.phase, event()))
        self._event = event

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with each phase just before it is entered."""
        self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Callable[[str], None]) -> None:
        """Stop calling `listener`."""
        self._listeners = tuple(other for other in self._listeners if other != listener)

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._pending[-1][0] if self._pending else self._state[0]

    def enter(self, phase: str) -> None:
        """Enter a phase."""
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
        """Context in which time counts as `phase`; the previous phase continues afterwards."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def waiting(self, axis: str) -> Iterator[None]:
        """Context that waits for the other ranks of an axis; the phase does not change."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.waited[axis] += seconds
            if self.phase in _PASSES:
                self.waited_in_passes += seconds

    def seconds(self) -> Seconds:
        """Return the seconds of each phase so far; with events, up to the device's last one."""
        state = self._state
        passed = state[2] if self._event else _passed(state, time.perf_counter())
        return dict(zip(PHASES, passed, strict=True))

    def _change(self, phase: str, now: float) -> None:
        self._state = (phase, now, _passed(self._state, now))


def cuda_event() -> torch.cuda.Event:
    """Record an event in the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _passed(state: tuple[str, float, tuple[float, ...]], now: float) -> tuple[float, ...]:
    phase, since, before = state
    passed = [*before]
    passed[_PLACES[phase]] += now - since
    return (*passed,)
