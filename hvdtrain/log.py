"""Logs: a structured file for each rank, and rank 0's lines on the screen."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from hvdtrain.untrusted import printable_lines

logger = logging.getLogger("hvdtrain")


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


class _File(logging.FileHandler):
    """A full disk keeps lines out of it; the run continues, and says so elsewhere.

    Where the file cannot be opened, that is tried again with each line.
    """

    def open(self) -> None:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        self.stream = self._open()

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is None:
            try:
                self.open()
            except OSError:
                return
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _Screen(logging.Handler):
    """Lines that do not tear a progress bar on the same stream; None: on stderr."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        stream = self._stream or sys.stderr
        # Nobody listens any more: training continues.
        with suppress(OSError), tqdm.external_write_mode(file=stream):
            # In one piece, as a launcher puts its prefix before each that it gets.
            stream.write(f"hvdtrain: {mark}{printable_lines(record.getMessage())}\n")
            stream.flush()


def to_screen(terminal: TextIO | None) -> None:
    """Shows what is logged on a terminal, or on stderr where there is none; for rank 0."""
    logger.setLevel(logging.INFO)
    logger.addHandler(_Screen(terminal))


def to_file(folder: Path, rank: int, host: str) -> None:
    """Appends what is logged to rank_NNNNN.jsonl: time (unix), level, rank, host, message.

    Raises:
        OSError: the file cannot be written now; that is tried again with each line.
    """
    handler = _File(folder / f"rank_{rank:05d}.jsonl", delay=True)
    handler.setFormatter(_Json(rank, host))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    handler.open()


def close_files() -> None:
    """Ends logging to files: this process's rank may be another from now on."""
    for handler in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
        logger.removeHandler(handler)
        handler.close()


def close() -> None:
    """Ends all logging, so that the next run in this process starts without handlers."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
