"""Output of the ranks on the driver's own output."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

_END_SECONDS = 5.0
_WAITING = 100_000  # pieces of output that wait for a slow terminal


def rank_prefix(number: int, stream: str, line: str) -> str:
    """Return a rank's name for a line that does not name its rank; rank 0's lines have none.

    Args:
        number: number of the process.
        stream: "stdout" or "stderr".
    """
    named = number == 0 or (stream == "stderr" and line.startswith("hvdtrain: "))
    return "" if named else f"[{number}]<{stream}>:"


class RankOutput:
    """Prints the ranks' output in a thread: a terminal that is stopped must not stop the driver.

    Args:
        prefix: returns what precedes a line, given (process number, stream, line).
        copy: called with (process number, stream, text with prefixes) of all output.
    """

    def __init__(
        self,
        prefix: Callable[[int, str, str], str] = rank_prefix,
        copy: Callable[[int, str, str], None] = lambda *_: None,
    ) -> None:
        self._prefix, self._copy = prefix, copy
        self._queue: queue.Queue[tuple[int, str, str] | None] = queue.Queue(_WAITING)
        self._dropped = 0  # pieces of output since the last one that was queued
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def put(self, number: int, stream: str, text: str) -> None:
        """Print lines of a process; `stream` is "stdout" or "stderr"."""
        lines = (self._prefix(number, stream, x) + x for x in text.splitlines(keepends=True))
        text, dropped = "".join(lines), self._dropped
        if dropped:
            text = f"hvdtrain: {dropped} blocks of output were dropped: the reader was slow\n{text}"
        try:
            self._queue.put_nowait((number, stream, text))
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def say(self, line: str) -> None:
        """Print a line of the driver on stdout, after the output so far."""
        with suppress(queue.Full):
            self._queue.put_nowait((-1, "stdout", f"{line}\n"))

    def end(self) -> None:
        """Wait until all is printed, for at most 5 s."""
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            number, stream, text = item
            with suppress(OSError, ValueError):  # the reader is gone: training continues
                target = sys.stdout if stream == "stdout" else sys.stderr
                target.write(text)
                target.flush()
            if number >= 0:
                with suppress(OSError):
                    self._copy(number, stream, text)
