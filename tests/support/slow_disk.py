"""A task whose checkpoints lie on a slow disk: each file takes seconds to read."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import layout, tensor_file
from tests.support.tasks import Regression

READS = 12  # of a file
SECONDS = 0.5  # that each takes


class _SlowFile(io.FileIO):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._bytes = os.stat(path).st_size // READS + 1

    def readinto(self, buffer: Any) -> int | None:
        time.sleep(SECONDS)
        return super().readinto(memoryview(buffer)[: self._bytes])

    def read(self, size: int | None = -1) -> bytes | None:  # type: ignore[override]
        time.sleep(SECONDS)
        return super().read(self._bytes)


def _open(path: Path, mode: str, buffering: int = -1) -> Any:
    return _SlowFile(path) if mode == "rb" else open(path, mode, buffering)


class OnSlowDisk(Regression):
    def __init__(self) -> None:
        for module in (layout, tensor_file):
            module.open = _open  # type: ignore[attr-defined]
