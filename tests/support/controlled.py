"""A task that a test disturbs while it runs, by files in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import horovod.torch as hvd
from torch import Tensor, nn

from tests.support.lagging import Lagging


class Controlled(Lagging):
    """Lagging; HVDTRAIN_TEST_CONTROL names a folder. As long as there is a file in it called

    nan: the loss of rank 1 is NaN
    quick: a micro-batch takes no time
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(os.environ["HVDTRAIN_TEST_CONTROL"])
        self._own_pace = self._pace

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        self._pace = 0.0 if (self._folder / "quick").exists() else self._own_pace
        losses = super().loss(model, batch)
        if hvd.rank() == 1 and (self._folder / "nan").exists():
            losses["loss"] = losses["loss"] * float("nan")
        return losses
