"""Tasks of which one rank can be made slow."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain.runtime.environment import launched_rank
from hvdtrain.tasks import Datasets
from hvdtrain.tasks.language_model import LanguageModel
from tests.support.tasks import Paced


class Lagging(Paced):
    """Paced, so a busy machine disturbs it little; one rank's data are slow while a file is there.

    HVDTRAIN_TEST_LAG=rank:seconds:PATH: rank `rank` takes so long for each sample.
    """

    def datasets(self) -> Datasets:
        return _lagging(super().datasets())


def _lagging(found: Datasets) -> Datasets:
    rank, seconds, path = os.environ["HVDTRAIN_TEST_LAG"].split(":")
    own = psutil.Process().environ()  # as it was at the start
    if int(rank) != launched_rank(own):
        return found
    return found._replace(train=_SlowToLoad(found.train, float(seconds), Path(path)))


class SlowToCompute(LanguageModel):
    """The language model; one rank takes longer for each micro-batch, before its model is called.

    HVDTRAIN_TEST_SLOW=rank:seconds
    """

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        rank, seconds = os.environ["HVDTRAIN_TEST_SLOW"].split(":")
        if int(rank) == launched_rank() and model.training:
            time.sleep(float(seconds))
        return super().loss(model, batch)  # type: ignore[arg-type]


class _SlowToLoad(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], seconds: float, path: Path) -> None:
        self._dataset = dataset
        self._seconds = seconds
        self._path = path

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if self._path.exists():
            time.sleep(self._seconds)
        return self._dataset[index]
