"""Sinks for metrics in addition to metrics.jsonl: the protocol, and a background thread for each.

A sink may fail, or block for minutes (a network, a disk): this is logged once and affects only the
sink's own metrics, never a step.
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

# Maximum number of lines of metrics.jsonl that wait for a slow sink.
_WAITING = 1000
_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET", re.IGNORECASE)
_SHORTEST_SECRET = 4
_LONGEST_MESSAGE = 300


class Sink(Protocol):
    """Target of metrics. All calls come from one thread; they may take long and raise anything.

    Attributes:
        name: for messages.
    """

    name: str

    def open(self, after: int) -> None:
        """Continue the run's curve, from the step after this one."""

    def write(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        """Store the finite metrics of a step, named as in metrics.jsonl; `at`: unix time."""

    def close(self, exit_code: int) -> None:
        """Save the remaining metrics; the process ends with this exit code."""


class BackgroundSink:
    """A sink with its own thread: only `wait` blocks on it, with a timeout.

    Attributes:
        stuck: the sink did not finish before the deadline of `wait`.
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
        """Open the sink for the steps after this one, in the background."""
        name = self._sink.name
        self._thread = threading.Thread(target=self._run, args=(after,), name=name, daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a line of metrics.jsonl, or drop it if too many lines wait; never blocks."""
        if self._off:
            return
        if self._lines.qsize() < _WAITING:
            self._lines.put(dict(record))
        elif not self._full:
            self._full = True
            self._warn(f"takes nothing: figures from step {record['step']} on are missing there")

    def close(self, exit_code: int) -> None:
        """Ask the sink to write the queued lines and to finish; `wait` waits for it.

        Args:
            exit_code: of the process.
        """
        self._exit_code = exit_code
        self._lines.put(None)

    def wait(self, deadline: float) -> None:
        """Wait for the end of the sink, at most until time.monotonic() is `deadline`."""
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
    """The finite numbers in a line, without its step and time."""
    return {
        key: float(value)
        for key, value in record.items()
        if key not in ("step", "time")
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def without_secrets(text: str) -> str:
    """The beginning of a library's message, without secrets.

    Removes users and passwords in addresses, and the values of environment variables whose names
    indicate a secret.
    """
    text = " ".join(re.sub(r"(?<=://)[^/@\s]+@", "", text).split())
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + " ..."
