"""Tiny tasks for tests, named to the app as `tests.support.tasks:CLASS`."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hvdtrain.tasks import Datasets

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
