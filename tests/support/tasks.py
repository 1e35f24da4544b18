"""Tiny tasks for tests, named to the app as `tests.support.tasks:CLASS`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hvdtrain.runtime.environment import launched_rank
from hvdtrain.tasks import Datasets
from hvdtrain.tasks.language_model import LanguageModel, LanguageModelConfig

FEATURES = 8
SAMPLES = 256
INJECTED = "injected failure"


class Regression:
    """A linear model on noise-free data; a few milliseconds a step, about 10 parameters."""

    defaults: ClassVar[dict[str, Any]] = {"train.steps": 10, "optim.lr": 0.01}

    def datasets(self) -> Datasets:
        x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
        rows = torch.cat((x, x.sum(dim=1, keepdim=True)), dim=1)
        return Datasets(rows, rows[:32])  # type: ignore[arg-type]  # a tensor is map-style too

    def model(self) -> nn.Module:
        return nn.Linear(FEATURES, 1)

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        """`batch`: (samples, FEATURES + 1) float32, the target in the last column."""
        return {"loss": nn.functional.mse_loss(model(batch[:, :-1]), batch[:, -1:])}


class Failing(Regression):
    """Raises on one rank in one step: HVDTRAIN_TEST_FAIL=rank:step, steps counted from 1.

    Steps are counted by calls, so a rank must have one micro-batch a step.
    """

    def __init__(self) -> None:
        self._rank, self._step = map(int, os.environ["HVDTRAIN_TEST_FAIL"].split(":"))
        self._calls = 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        import horovod.torch as hvd

        self._calls += 1
        if (hvd.rank(), self._calls) == (self._rank, self._step):
            raise RuntimeError(INJECTED)
        return super().loss(model, batch)


class NotFinite(Regression):
    """A loss that is NaN in some steps, in one micro-batch of each.

    HVDTRAIN_TEST_NAN=4,5 names the steps, counted from 1; 4- means all from 4 on. With one
    rank, and `TINY_BATCHES` micro-batches a step.
    """

    TINY_BATCHES = 4

    def __init__(self) -> None:
        self._steps = os.environ["HVDTRAIN_TEST_NAN"]
        self._calls = 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        step, number = divmod(self._calls, self.TINY_BATCHES)
        self._calls += 1
        losses = super().loss(model, batch)
        if number == 1 and self._is_bad(step + 1):
            losses["loss"] = losses["loss"] * float("nan")
        return losses

    def _is_bad(self, step: int) -> bool:
        if self._steps.endswith("-"):
            return step >= int(self._steps[:-1])
        return str(step) in self._steps.split(",")


class Signalled(LanguageModel):
    """The language model; a rank gets signals from itself.

    HVDTRAIN_TEST_SIGNAL=SIGTERM:9,SIGKILL:14:1 sends them in the 9th micro-batch of rank 0's
    process and in the 14th of rank 1's, counted from 1.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        self._signals: dict[int, str] = {}
        for entry in filter(None, os.environ.get("HVDTRAIN_TEST_SIGNAL", "").split(",")):
            name, at, rank = (*entry.split(":"), "0")[:3]
            if int(rank) == launched_rank():
                self._signals[int(at)] = name
        self._calls = 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        self._calls += 1
        if self._calls in self._signals:
            os.kill(os.getpid(), signal.Signals[self._signals[self._calls]])
        return super().loss(model, batch)  # type: ignore[arg-type]


class Paced(LanguageModel):
    """The language model; in a Slurm job's first start each micro-batch takes a while.

    HVDTRAIN_TEST_PACE: that many seconds, so that there is time to disturb the job.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        first = "SLURM_RESTART_COUNT" not in os.environ
        self._seconds = float(os.environ.get("HVDTRAIN_TEST_PACE", "0")) if first else 0.0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        time.sleep(self._seconds)
        return super().loss(model, batch)  # type: ignore[arg-type]
