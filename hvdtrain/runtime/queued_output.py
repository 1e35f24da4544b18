"""Output of drivers, supervisors and agents, which never wait for its reader and never fail by it.

The reader may stop (Ctrl-S, `less`), be gone (`head`, a closed terminal), or be a file on a full
disk. `queued` replaces stdout and stderr, so that a thread writes all output from one queue. The
thread exists only while there is output: agents fork ranks. What does not fit into the queue or
cannot be written is dropped, and reported as soon as the same destination accepts output.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hvdtrain.untrusted import printable_lines

FLUSH_SECONDS = 5.0
_MOST_BYTES = 16 << 20  # in the queue
_ENTRY_BYTES = 128  # memory of an entry besides its content


class Destination:
    """A destination of output; `put` queues bytes for it.

    Args:
        write: as os.write to the destination; called in the writing thread.
    """

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self.dropped = 0  # bytes since the last ones that were written

    def put(self, content: bytes) -> None:
        _queue.put(self, content)

    def deliver(self, content: bytes) -> None:
        """Write after a line about what was dropped before; drop what cannot be written."""
        dropped, self.dropped = self.dropped, 0
        missing = f"hvdtrain: {dropped} bytes of output were dropped: the reader was slow, or "
        left = (f"{missing}they could not be written\n".encode() if dropped else b"") + content
        try:
            while left:
                left = left[self._write(left) :]
        except (OSError, ValueError):
            kept = dropped if len(left) > len(content) else 0
            self.dropped += kept + min(len(left), len(content))


class _Queue:
    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the parent writes its own output

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._entries: deque[tuple[Destination, bytes]] = deque()
        self._bytes = 0
        self._writing = False

    def put(self, destination: Destination, content: bytes) -> None:
        with self._changed:
            size = len(content) + _ENTRY_BYTES
            if self._bytes + size > _MOST_BYTES:
                destination.dropped += len(content)
                return
            self._entries.append((destination, content))
            self._bytes += size
            if self._writing:
                return
            self._writing = True
        try:
            threading.Thread(target=self._write, name="output", daemon=True).start()
        except RuntimeError:  # no thread can be started now; the next output tries again
            self._writing = False

    def _write(self) -> None:
        reached = set[Destination]()
        while True:
            with self._changed:
                if not self._entries:
                    reached = {destination for destination in reached if destination.dropped}
                if not self._entries and not reached:
                    self._writing = False
                    self._changed.notify_all()
                    return
                destination, content = (
                    self._entries.popleft() if self._entries else (reached.pop(), b"")
                )
            destination.deliver(content)
            with self._changed:
                if content:
                    reached.add(destination)
                    self._bytes -= len(content) + _ENTRY_BYTES

    def flush(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._writing, seconds)


_queue = _Queue()


class _Stream:
    """stdout or stderr of this process; all that is not written here is the original's."""

    def __init__(self, original: Any) -> None:
        self._original, self._destination = original, Destination(_writer(original))

    def write(self, text: str | bytes) -> int:
        encoding = getattr(self._original, "encoding", None) or "utf-8"
        encoded = text.encode(encoding, "backslashreplace") if isinstance(text, str) else text
        if encoded:
            self._destination.put(encoded)
        return len(text)

    def flush(self) -> None:
        pass

    @property
    def buffer(self) -> _Stream:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _writer(stream: Any) -> Callable[[bytes], int]:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # in a notebook

        def show(content: bytes) -> int:
            stream.write(content.decode(errors="replace"))
            stream.flush()
            return len(content)

        return show

    def write(content: bytes) -> int:
        try:
            return os.write(descriptor, content)
        except BlockingIOError:  # another program has changed the terminal
            select.select([], [descriptor], [])
            return 0

    return write


@contextmanager
def queued() -> Iterator[None]:
    """Queue all output of this process inside the context; write it at the end, for at most 5 s.

    Output stays queued if the reader does not respond: it must not stop the end of the process.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        with suppress(OSError, ValueError):
            stream.flush()
    sys.stdout, sys.stderr = map(_Stream, before)
    try:
        yield
    finally:
        if flush():
            sys.stdout, sys.stderr = before


def flush(seconds: float = FLUSH_SECONDS) -> bool:
    """Wait until all queued output is written; return whether it is."""
    return _queue.flush(seconds)


def say(message: str, who: str = "hvdtrain") -> None:
    """Print a message on stderr if that is possible, as one write; it may quote other users."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{who}: {printable_lines(message)}\n")
        sys.stderr.flush()
