"""RUN/metrics.jsonl: one line a logged step, never a step twice, never a gap."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hvdtrain.files import write_atomic


class MetricsFile:
    """Appends lines; only rank 0 has one.

    Args:
        path: the file; it is made if it is not there.
        after: lines of steps beyond this one move to left_metrics.jsonl beside it: the run
            does these again.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, after: int) -> None:
        # A crash may have left anything at the end, also a line without its newline.
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = text.splitlines()
        kept = [line for line in lines if (step := _step(line)) is not None and step <= after]
        self.last_step = _step(kept[-1]) if kept else None  # of the last line
        whole = "".join(line + "\n" for line in kept)
        if whole != text:
            staying = set(kept)
            with open(path.with_name(f"left_{path.name}"), "a", encoding="utf-8") as left:
                left.writelines(line + "\n" for line in lines if line not in staying)
            write_atomic(path, whole.encode())
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line; it reaches the system at once and the disk with `sync`."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.last_step = record["step"]

    def sync(self) -> None:
        """Waits until the disk has every line: before a checkpoint says that they are there."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _step(line: str) -> int | None:
    """The step of a line, or None where a crash tore it."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
