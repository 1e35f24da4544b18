"""RUN/metrics.jsonl and RUN/ranks.jsonl: one line per logged step, without duplicates or gaps."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import Any

from hvdtrain.file_thread import call_aside
from hvdtrain.files import is_open_at, write_atomic
from hvdtrain.log import logger
from hvdtrain.run_files.ownership import Ownership
from hvdtrain.run_files.removed import content_of_removed
from hvdtrain.untrusted import parse_json

# Timeout for confirming the ownership of the run; longer means that the disk does not respond.
_HELD_SECONDS = 5.0
_PAUSE_SECONDS = 0.1  # between two writes: short steps have one together


class MetricsFile:
    """Append-only file with one line per logged step, on rank 0 only.

    If writing fails, lines are kept and retried with the next line, from the byte at which writing
    stopped: once there is space again, the file has no gap and no incomplete line. While the disk
    does not respond, lines are kept as well, and a step does not wait for it.

    Args:
        path: the file; it is created if missing.
        after: lines of steps after this one move to left_NAME in the same directory, because the
            run repeats these steps.
        ownership: while it is not known whether this process owns the run, lines are kept as well.
        tolerate_errors: log failed writes instead of raising, because other ranks hold state that
            would be lost.

    Attributes:
        last_step: step of the last line; None if there is none.
        superseded_steps: number of steps covered by the most recently moved lines.
        failures: how often the file could not be written.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        after: int,
        ownership: Ownership | None = None,
        tolerate_errors: bool = False,
    ) -> None:
        self._path = path
        self._ownership = ownership or Ownership(path.parent)
        self._file: int | None = None
        self._closed = False
        # Each use of it is a single operation, because `write` appends without the lock.
        self._unwritten = bytearray()
        self._lock = Lock()  # of the file; held as long as a disk does not respond
        self._failed = False
        self._pause_until = 0.0  # time.monotonic()
        self.failures = 0
        # A crash may have left anything at the end, including a line without its newline.
        content = path.read_bytes() if path.exists() else b""
        lines = content.split(b"\n")
        steps = [_step(line) for line in lines]
        kept = [line for line, step in zip(lines, steps, strict=True) if _within(step, after)]
        self.last_step = _step(kept[-1]) if kept else None
        self.superseded_steps = max(0, max((step for step in steps if step), default=0) - after)
        try:
            self._keep(content, kept, tolerate_errors)
            self._open()
        except OSError as error:
            if not tolerate_errors:
                raise
            self.report(error)

    def _keep(self, content: bytes, kept: list[bytes], tolerate_errors: bool) -> None:
        """Keep only these lines in the file and move the others."""
        whole = b"".join(line + b"\n" for line in kept)
        if whole == content:
            return
        if whole == content + b"\n":
            self._unwritten += b"\n"
            return
        staying = set(kept)
        left = [line for line in content.split(b"\n") if line and line not in staying]
        try:
            with open(self._path.with_name(f"left_{self._path.name}"), "ab") as file:
                file.writelines(line + b"\n" for line in left)
        except OSError as error:
            if not tolerate_errors:
                raise
            self.report(error)
        if content.startswith(whole):
            os.truncate(self._path, len(whole))  # requires no disk space
        else:
            write_atomic(self._path, whole)

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def _reopen(self) -> None:
        """Make the file again if it was removed or moved; continue in a file that replaced it."""
        if self._file is None or is_open_at(self._file, self._path):
            return
        if self._path.is_file():
            logger.warning("%s was replaced while the run trains; it is continued", self._path)
        else:
            self._unwritten[:0] = content_of_removed(self._path, self._file)
        os.close(self._file)
        self._file = None

    def roll_back(self, after: int) -> None:
        """Move lines of steps after `after`, as at the start: the run repeats these steps."""
        self.superseded_steps = max(0, (self.last_step or 0) - after)
        if not self.superseded_steps:
            return
        try:
            with self._owned():
                self._reopen()
                if self._file is None:
                    self._open()
                written = self._path.read_bytes()
                content = written + bytes(self._unwritten)
                lines: list[bytes] = content.splitlines(keepends=True)
                staying = takewhile(lambda line: _within(_step(line), after), lines)
                kept = b"".join(staying)
                left = content[len(kept) :]
                self._unwritten[:] = kept[len(written) :]
                os.truncate(self._path, min(len(kept), len(written)))  # requires no disk space
                with open(self._path.with_name(f"left_{self._path.name}"), "ab") as file:
                    file.write(left)
        except OSError as error:
            self.report(error)
        self.last_step = after

    @contextmanager
    def _owned(self) -> Iterator[None]:
        """Context in which this thread alone uses the file, and this process owns the run.

        Raises:
            OSError: it is not known whether it does, or its disk is away or does not respond.
        """
        self._ownership.confirm(_HELD_SECONDS)
        if not self._lock.acquire(timeout=_HELD_SECONDS):
            raise OSError(errno.ETIMEDOUT, "no response")
        try:
            yield
        finally:
            self._lock.release()

    def write(self, record: dict[str, Any]) -> None:
        """Append one line.

        It reaches the operating system at once, by another thread, or with those of other steps a
        tenth of a second after the last write; and the disk with `sync`. If this process is killed
        before, the next rank 0 can still write it.
        """
        self.last_step = record["step"]
        self._unwritten += json.dumps(record).encode() + b"\n"
        delay = max(0.0, self._pause_until - time.monotonic())
        if call_aside(self._write_waiting, delay) > _HELD_SECONDS and not self._failed:
            self.report(OSError(errno.ETIMEDOUT, "no response"))

    def _write_waiting(self) -> None:
        with self._lock:
            if not self._ownership.held():
                return
            try:
                self._flush()
            except OSError as error:
                self.report(error)
            self._pause_until = time.monotonic() + _PAUSE_SECONDS

    def report(self, error: OSError) -> None:
        """Log that the file cannot be written; once until it can be."""
        self.failures += 1
        if not self._failed:
            logger.error(
                "%s cannot be written (%s); training continues, and its lines are kept until "
                "writing succeeds",
                self._path,
                error.strerror,
            )
        self._failed = True

    def _flush(self) -> None:
        if self._file is None and not self._closed:
            self._ownership.confirm(0.0)
            self._open()
        while self._unwritten:
            if self._closed or self._file is None:
                raise OSError(errno.EBADF, "it is closed")
            done = os.write(self._file, bytes(self._unwritten))
            del self._unwritten[:done]
        if self._failed:
            logger.info("%s can be written again; it is complete", self._path)
            self._failed = False

    def sync(self) -> None:
        """Wait until every line is on disk, also if the file was removed; before a checkpoint.

        Raises:
            OSError: a line could not be written.
        """
        if self._closed:  # its lines were written, or reported as lost
            return
        with self._owned():
            self._reopen()
            self._flush()
        # A separate descriptor, because the file may be closed while the disk is slow.
        file = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def close(self) -> None:
        try:
            with self._owned():
                self._reopen()
                if self._unwritten:
                    self._flush()
        except OSError as error:
            if self._unwritten:
                self.report(error)
        self._closed = True  # a late write fails instead of writing into another file
        if self._unwritten:
            lines = self._unwritten.count(b"\n")
            logger.error("%s: %d lines are lost", self._path, lines)
        call_aside(self._close)

    def _close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def _within(step: int | None, after: int) -> bool:
    return step is not None and step <= after


def _step(line: bytes) -> int | None:
    """The step of a line; None if the line is incomplete."""
    try:
        return int(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
