"""A task in whose processes something is wrong, by the number under which they were started."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd
import psutil
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn

import hvdtrain.run.prepare
from hvdtrain.engine.state import RunState
from hvdtrain.runtime.environment import launched_rank
from hvdtrain.tasks import Datasets
from tests.support.tasks import Paced

BAD_SAMPLE = 77


def _trouble() -> str:
    """HVDTRAIN_TEST_TROUBLE=3:device,4:data: what is wrong with this process; "*" is any."""
    own = psutil.Process().environ()  # as it was at the start
    entries = os.environ.get("HVDTRAIN_TEST_TROUBLE", "").split(",")
    troubles = dict(entry.split(":") for entry in entries if entry)
    return troubles.get(str(launched_rank(own)), troubles.get("*", ""))


class Troubled(Paced):
    """Paced.

    sample: one sample of the data raises, on whatever rank it falls.
    data: one sample less than the others have.
    device: the process has another device than the others. No test machine has two kinds, so
        it is set in place of what `choose_device` finds.
    hand-over: the state of the others does not get through to it: its exchange fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trouble = _trouble()
        if self._trouble == "hand-over":
            RunState.broadcast = _fail  # type: ignore[method-assign]

    def datasets(self) -> Datasets:
        datasets = super().datasets()
        if self._trouble != "data":
            return datasets
        return Datasets(datasets.train[:-1], datasets.validation)  # type: ignore[index]

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        bad = super().datasets().train[BAD_SAMPLE]
        if self._trouble == "sample" and model.training and (batch == bad).all(dim=1).any():
            raise ValueError("a bad sample")
        return super().loss(model, batch)


def _fail(*_: Any, **__: Any) -> None:
    hvd.shutdown()
    raise HorovodInternalError("the network between here and there")


if _trouble() == "device":
    hvdtrain.run.prepare.choose_device = lambda *_: torch.device("meta")
