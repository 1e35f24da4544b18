"""A task that a test disturbs while it runs, by files in a folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import horovod.torch as hvd
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain.tasks import Datasets
from tests.support.tasks import FEATURES, Paced

_SAMPLE_SECONDS = 0.1


class Controlled(Paced):
    """Paced; HVDTRAIN_TEST_CONTROL names a folder. As long as there is a file in it called

    data-RANK: each sample takes that rank 0.1 s more to load
    nan: the loss of rank 1 is NaN
    quick: a micro-batch takes no time
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(os.environ["HVDTRAIN_TEST_CONTROL"])

    def datasets(self) -> Datasets:
        found = super().datasets()
        return Datasets(_Rows(found.train, self._folder), found.validation)  # type: ignore[arg-type]

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        pace = self._pace
        if (self._folder / "quick").exists():
            self._pace = 0.0
        losses = super().loss(model, batch)
        self._pace = pace
        if hvd.rank() == 1 and (self._folder / "nan").exists():
            losses["loss"] = losses["loss"] * float("nan")
        return losses


class _Rows(Dataset[Tensor]):
    """Rows of `FEATURES` + 1 numbers."""

    def __init__(self, rows: Tensor, folder: Path) -> None:
        assert rows.shape[1] == FEATURES + 1
        self._rows = rows
        self._folder = folder

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        if (self._folder / f"data-{hvd.rank()}").exists():
            time.sleep(_SAMPLE_SECONDS)
        return self._rows[index]
