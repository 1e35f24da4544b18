"""A model of transformers, whose rank is killed in the middle of a run."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
from torch import nn

from hvdtrain.tasks.huggingface import HuggingFace
from hvdtrain.tasks.huggingface_config import HuggingFaceTaskConfig


class KilledHuggingFace(HuggingFace):
    """HVDTRAIN_TEST_KILL=process:call: that process gets SIGKILL in that training micro-batch."""

    def __init__(self, config: HuggingFaceTaskConfig) -> None:
        super().__init__(config)
        process, self._last = os.environ["HVDTRAIN_TEST_KILL"].split(":")
        # As it was at the start: a process of an elastic run prepares as a world of one.
        self._killed = process == psutil.Process().environ().get("HOROVOD_RANK")
        self._calls = 0

    def loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        self._calls += model.training
        if self._killed and self._calls == int(self._last):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
