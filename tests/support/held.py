"""A task whose first process waits at a given place, so that something can be done to it there."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil
from torch import Tensor, nn

from hvdtrain.runtime.environment import launched_rank
from tests.support.tasks import Paced

_LONGEST_SECONDS = 60.0


class Held(Paced):
    """Paced; the process that was started as number 0 waits once.

    HVDTRAIN_TEST_HOLD=place:PATH: at `place` it makes the file PATH, and continues when the file
    is gone. Places: step (its first micro-batch), evaluation (its first one), save (its first
    checkpoint: model.safetensors is written, optimizer.safetensors not yet on the disk).
    """

    def __init__(self) -> None:
        super().__init__()
        place, _, path = os.environ.get("HVDTRAIN_TEST_HOLD", "").partition(":")
        own = psutil.Process().environ()  # as it was at the start
        self._place = place if launched_rank(own) == 0 else ""
        self._path = Path(path)
        if self._place == "save":
            self._hold_save()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if self._place == ("step" if model.training else "evaluation"):
            self._hold()
        return super().loss(model, batch)

    def _hold_save(self) -> None:
        fsync = os.fsync

        def holding(file: int) -> None:
            written = os.readlink(f"/proc/self/fd/{file}")
            saving = threading.current_thread().name == "checkpoint"
            if saving and self._place and written.endswith("/optimizer.safetensors"):
                self._hold()
            fsync(file)

        os.fsync = holding

    def _hold(self) -> None:
        self._place = ""
        self._path.touch()
        deadline = time.monotonic() + _LONGEST_SECONDS
        while self._path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
