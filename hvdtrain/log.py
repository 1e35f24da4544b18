"""Logging: a structured file for each rank, and rank 0's lines on the screen.

Debug lines are only in the files: they explain, and ask for no action. During a run the root logger
gets no lines, so a script that configures logging sees none of them twice.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from hvdtrain.file_thread import call_aside
from hvdtrain.text import styled
from hvdtrain.untrusted import printable_lines

_MOST_LINES = 1000  # that wait for a disk


class _Logger(logging.Logger):
    """Logger that cannot be disabled during a run.

    `logging.config.dictConfig` disables each existing logger that it does not name.
    """

    _disabled = False

    @property
    def disabled(self) -> bool:
        return self._disabled and not any(isinstance(h, _File | _Screen) for h in self.handlers)

    @disabled.setter
    def disabled(self, disabled: bool) -> None:
        self._disabled = disabled


logger = logging.getLogger("hvdtrain")
logger.__class__ = _Logger  # the script may have created it before


class _Json(logging.Formatter):
    def __init__(self, rank: int, host: str) -> None:
        super().__init__()
        self._where = {"rank": rank, "host": host}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            **self._where,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _File(WatchedFileHandler):
    """File handler that drops lines when the disk is full; the run continues.

    If the file cannot be opened, each line tries again. A file that was removed is made again.
    While the disk does not respond, the last lines wait for it.
    """

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        super().__init__(path, delay=True)
        self._check = check
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._process = os.getpid()

    def open(self) -> None:
        """Open the file, also if it was removed; raise OSError if that is impossible."""
        try:
            if self.stream is None:
                self.stream = self._open()
                self._statstream()
            else:
                self.reopenIfNeeded()
        except OSError:
            self.stream = None  # perhaps half closed
            raise

    def _open(self) -> TextIOWrapper:
        self._check()
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        if self._process != os.getpid():  # forked: the lines that wait are the parent's
            self._process = os.getpid()
            self._lines.clear()
        try:
            self._lines.append(self.format(record) + self.terminator)
        except Exception:
            self.handleError(record)
        call_aside(self._write)

    def _write(self) -> None:
        while self._lines:
            line = self._lines.popleft()
            with suppress(OSError):
                self.open()
                assert self.stream is not None
                self.stream.write(line)
                self.stream.flush()

    def flush(self) -> None:
        """Do nothing: `_write` does, in the other thread. `logging.shutdown` must not wait."""

    def close(self) -> None:
        call_aside(self._close_stream)
        logging.Handler.close(self)

    def _close_stream(self) -> None:
        if self.stream is not None:
            with suppress(OSError):
                self.stream.close()
            self.stream = None


class _Screen(logging.Handler):
    """Handler whose lines do not break a progress bar on the same stream; None: stderr."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(logging.INFO)
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        stream, mark = self._stream or sys.stderr, ""
        if record.levelno >= logging.WARNING:
            color = "yellow" if record.levelno == logging.WARNING else "red"
            mark = styled(f"{record.levelname.lower()}: ", color, stream)
        # An OSError means that the reader is gone: training continues.
        with suppress(OSError), tqdm.external_write_mode(file=stream):
            # One write per line, because a launcher prefixes each write.
            stream.write(f"hvdtrain: {mark}{printable_lines(record.getMessage())}\n")
            stream.flush()


def to_screen(terminal: TextIO | None) -> None:
    """Log to a terminal, or to stderr without one; for rank 0."""
    _remove(_Screen)
    _add(_Screen(terminal))


def to_file(
    directory: Path, rank: int, host: str, check: Callable[[], None] = lambda: None
) -> None:
    """Append log lines to rank_NNNNN.jsonl: time (unix), level, rank, host, message.

    Args:
        check: called before the file is opened or made; raises OSError if that must not be.

    Raises:
        OSError: the file cannot be written now; each line tries again.
    """
    handler = _File(directory / f"rank_{rank:05d}.jsonl", check)
    handler.setFormatter(_Json(rank, host))
    _add(handler)
    handler.open()


def close_files() -> None:
    """Stop logging to files, because this process's rank may change."""
    _remove(_File)


def close() -> None:
    """Stop all logging, so that the next run in this process starts without handlers."""
    _remove(_File, _Screen)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def _add(handler: logging.Handler) -> None:
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)


def _remove(*kinds: type[logging.Handler]) -> None:
    """Remove hvdtrain's own handlers; handlers that a script has added stay."""
    for handler in [h for h in logger.handlers if isinstance(h, kinds)]:
        logger.removeHandler(handler)
        handler.close()
