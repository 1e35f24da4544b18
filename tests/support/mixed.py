"""A mixture of token files and text for the task language_model, and a rank that kills itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hvdtrain.data.token_files import TokenMeta
from hvdtrain.models.gpt import GPT
from hvdtrain.tasks.language_model import LanguageModel, LanguageModelConfig
from tests.support.runs import CORPUS

RARE = "rare"  # a source that most steps do not use


class KilledLanguageModel(LanguageModel):
    """HVDTRAIN_TEST_KILL=process:call sends SIGKILL in that training micro-batch."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        process, self._last = os.environ["HVDTRAIN_TEST_KILL"].split(":")
        # As at the start: a process of an elastic run prepares as a world of one.
        self._killed = process == psutil.Process().environ().get("HOROVOD_RANK")
        self._calls = 0

    def loss(self, model: GPT, batch: Any) -> dict[str, Any]:
        self._calls += model.training
        if self._killed and self._calls == int(self._last):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def write(directory: Path) -> str:
    """Write three sources: token files, text, and rare text; return the flag that mixes them."""
    directory.mkdir()
    text = CORPUS.read_bytes()
    tokens = np.frombuffer(text, dtype=np.uint8).astype("<u2")
    for number, part in enumerate(np.array_split(tokens[:6000], 5)):
        part.tofile(directory / f"web-{number}.u16")
    TokenMeta(256, "bytes").write(directory)
    (directory / "code.txt").write_bytes(text[6000:9000])
    (directory / "rare.txt").write_bytes(text[9000:])
    return (
        f"--data.mixture={{web: {{path: {directory}/web-*.u16, source: tokens, weight: 0.6}}, "
        f"code: {{path: {directory}/code.txt, weight: 0.38}}, "
        f"{RARE}: {{path: {directory}/rare.txt, weight: 0.02}}}}"
    )
