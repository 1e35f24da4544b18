"""Where figures go beside metrics.jsonl: a protocol, and the thread that keeps sinks off the steps.

A sink may fail, and it may block for minutes (a network, a disk): that is said once and costs
its own figures, never a step.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from hvdtrain.errors import EXIT_CRASH
from hvdtrain.log import logger

# Lines of metrics.jsonl that wait while a sink is slow.
_WAITING = 1000
_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET", re.IGNORECASE)
_SHORTEST_SECRET = 4
_LONGEST_MESSAGE = 300


class Sink(Protocol):
    """All calls come from one thread; they may take long and may raise anything.

    Attributes:
        name: for messages.
    """

    name: str

    def open(self, after: int) -> None:
        """Goes on with the run's curve, from the step after this one."""

    def write(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        """Takes the finite figures of a step, named as in metrics.jsonl; `at`: unix time."""

    def close(self, exit_code: int) -> None:
        """Saves what it has; the process ends with this code."""


class BackgroundSink:
    """A sink with a thread of its own: nobody waits for it but `wait`, and that not for ever.

    Attributes:
        stuck: it has not come back in the time that `wait` gave it.
    """

    def __init__(self, sink: Sink) -> None:
        self.stuck = False
        self._sink = sink
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._exit_code = EXIT_CRASH
        self._thread: threading.Thread | None = None
        self._off = False  # it could not be opened
        self._failed = False
        self._full = False

    def start(self, after: int) -> None:
        """Opens the sink for the steps after this one, in the background."""
        name = self._sink.name
        self._thread = threading.Thread(target=self._run, args=(after,), name=name, daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Hands over a line of metrics.jsonl, or drops it where too many wait; never waits."""
        if self._off:
            return
        if self._lines.qsize() < _WAITING:
            self._lines.put(dict(record))
        elif not self._full:
            self._full = True
            self._warn(f"takes nothing: figures from step {record['step']} on are missing there")

    def close(self, exit_code: int) -> None:
        """Asks the sink to take what waits and to end; `wait` sees that it does.

        Args:
            exit_code: with which the process ends.
        """
        self._exit_code = exit_code
        self._lines.put(None)

    def wait(self, deadline: float) -> None:
        """For the end of the sink, until time.monotonic() is `deadline` at most."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self.stuck = self._thread.is_alive()
        if self.stuck:
            self._warn("did not take its last figures in time")

    def _run(self, after: int) -> None:
        self._off = not self._try(lambda: self._sink.open(after))
        if self._off:
            return
        while (record := self._lines.get()) is not None:
            self._try(partial(self._write, record))
        self._try(lambda: self._sink.close(self._exit_code))

    def _write(self, record: Mapping[str, Any]) -> None:
        self._sink.write(record["step"], record["time"], _figures(record))

    def _try(self, part: Callable[[], None]) -> bool:
        try:
            part()
        except Exception as error:
            if not self._failed:
                self._failed = True
                self._warn(f"failed ({type(error).__name__}: {without_secrets(str(error))})")
            return False
        return True

    def _warn(self, what: str) -> None:
        logger.warning(
            "%s %s; training continues, and metrics.jsonl has every figure", self._sink.name, what
        )


def _figures(record: Mapping[str, Any]) -> dict[str, float]:
    """What of a line is a finite number, but its step and time."""
    return {
        key: float(value)
        for key, value in record.items()
        if key not in ("step", "time")
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def without_secrets(text: str) -> str:
    """The beginning of a library's message, without what nobody else should read.

    That are users and passwords in addresses, and the values of variables of the environment
    whose names say that they are secret.
    """
    text = " ".join(re.sub(r"(?<=://)[^/@\s]+@", "", text).split())
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + " ..."
