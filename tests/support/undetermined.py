"""Tasks without deterministic gradients, on a CPU that stands in for a GPU."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.support.tasks import FEATURES, Regression


class CheckedOnCpus(Regression):
    """A model with BatchNorm and dropout; an exact run checks it on a CPU as on a GPU."""

    def __init__(self) -> None:
        patch("hvdtrain.process.repeatable.CHECKED", ("cpu",)).start()

    def model(self) -> nn.Module:
        layers = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1)
        return nn.Sequential(*layers)


class NotChecked(CheckedOnCpus):
    """The same model, without the check."""

    def __init__(self) -> None:
        return


class _Jitter(torch.autograd.Function):
    """The identity, whose backward pass is another one in each call."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        _Jitter.calls += 1
        return gradient * (1 + 2**-20 * _Jitter.calls)


class Jittering(CheckedOnCpus):
    """The gradients of the first layer are different ones in each backward pass."""

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        model[0].register_forward_hook(lambda module, inputs, y: _Jitter.apply(y))
        return model


class WithoutKernel(CheckedOnCpus):
    """Calls an operation without a deterministic kernel, which raises an error as on a GPU.

    HVDTRAIN_TEST_CALLS: calls of `loss` before; HVDTRAIN_TEST_CHECKED=0: no check before the run.
    """

    def __init__(self) -> None:
        self._left = int(os.environ.get("HVDTRAIN_TEST_CALLS", "0"))
        if os.environ.get("HVDTRAIN_TEST_CHECKED") != "0":
            super().__init__()

    def model(self) -> nn.Module:
        torch.use_deterministic_algorithms(True)
        return super().model()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if self._left == 0:
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        self._left -= 1
        return super().loss(model, batch)
