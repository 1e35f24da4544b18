"""RUN/metrics.jsonl and RUN/ranks.jsonl: one line a logged step, never a step twice, no gap."""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Lock
from typing import Any

from hvdtrain.files import write_atomic
from hvdtrain.log import logger


class MetricsFile:
    """Appends lines; only rank 0 has them.

    While the disk takes nothing, lines are kept and tried again with the next, from the byte
    at which it stopped: the file has no gap and no torn line when there is room again.

    Args:
        path: the file; it is made if it is not there.
        after: lines of steps beyond this one move to left_NAME beside it: the run does these
            again.

    Attributes:
        last_step: of the last line; None where there is none.
        set_aside: steps that the lines which were moved stand for.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, after: int) -> None:
        # A crash may have left anything at the end, also a line without its newline.
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = text.splitlines()
        kept = [line for line in lines if (step := _step(line)) is not None and step <= after]
        self.last_step = _step(kept[-1]) if kept else None
        newest = max((step for line in lines if (step := _step(line)) is not None), default=0)
        self.set_aside = max(0, newest - after)
        whole = "".join(line + "\n" for line in kept)
        if whole != text:
            staying = set(kept)
            with open(path.with_name(f"left_{path.name}"), "a", encoding="utf-8") as left:
                left.writelines(line + "\n" for line in lines if line not in staying)
            write_atomic(path, whole.encode())
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._unwritten = bytearray()
        self._lock = Lock()  # `sync` is called from another thread than the rest
        self._failed = False

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line; it reaches the system at once and the disk with `sync`."""
        self.last_step = record["step"]
        with self._lock:
            self._unwritten += json.dumps(record).encode() + b"\n"
            try:
                self._flush()
            except OSError as error:
                if not self._failed:
                    logger.error(
                        "%s cannot be written (%s); training goes on, and its lines are kept "
                        "until they can",
                        self._path,
                        error.strerror,
                    )
                self._failed = True

    def _flush(self) -> None:
        while self._unwritten:
            done = os.write(self._file, self._unwritten)
            del self._unwritten[:done]
        if self._failed:
            logger.info("%s can be written again; it is complete", self._path)
            self._failed = False

    def sync(self) -> None:
        """Waits until the disk has every line: before a checkpoint says that they are there.

        Raises:
            OSError: it has not.
        """
        with self._lock:
            self._flush()
        # A descriptor of its own: the file may be closed while the disk is slow.
        file = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def close(self) -> None:
        with self._lock:
            try:
                self._flush()
            except OSError as error:
                lines = self._unwritten.count(b"\n")
                logger.error("%s: %d lines are lost (%s)", self._path, lines, error.strerror)
            os.close(self._file)
            self._file = -1  # a late `sync` fails instead of writing into another file


def _step(line: str) -> int | None:
    """The step of a line, or None where a crash tore it."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
