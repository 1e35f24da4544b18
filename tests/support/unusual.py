"""Tasks whose models behave unusually: `tests.support.unusual:CLASS`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset

from hvdtrain.tasks import Datasets
from tests.support.tasks import FEATURES, Regression


class HalfAsleep(Regression):
    """The task keeps a part of the model in eval mode, so its statistics do not change."""

    def model(self) -> nn.Module:
        asleep = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(0.5)).eval()
        return nn.Sequential(nn.BatchNorm1d(FEATURES), asleep, nn.Linear(FEATURES, 1))


class Rebound(nn.Module):
    """A running mean that is a new tensor after each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        return x - self.mean


class Poisoned(Regression):
    """One sample contains NaN, which reaches every statistic of the model."""

    def datasets(self) -> Datasets:
        rows = super().datasets().train
        assert isinstance(rows, Tensor)
        poisoned = rows.clone()
        poisoned[100, 0] = float("nan")
        return Datasets(poisoned, rows[:32])  # type: ignore[arg-type]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(FEATURES), Rebound(), nn.Linear(FEATURES, 1))


class Drawing(Regression):
    """A loss that draws random numbers in evaluation too, as in diffusion models."""

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        noise = torch.randn_like(batch[:, :-1])
        return {"loss": nn.functional.mse_loss(model(batch[:, :-1] + noise), batch[:, -1:])}


class _Images(Regression):
    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        images = batch[:, :8].reshape(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        return {"loss": nn.functional.mse_loss(model(images), batch[:, -1:])}


class RowMajor(_Images):
    """Two convolutions."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 6, 2, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 2),
            # Last and without a bias: Horovod checks only the first parameter of a bucket.
            nn.Conv2d(4, 1, 2, bias=False), nn.Flatten(),
        )  # fmt: skip


class ChannelsLast(RowMajor):
    """The same, with channels_last weights."""

    def model(self) -> nn.Module:
        return super().model().to(memory_format=torch.channels_last)


class Float16(Regression):
    defaults: ClassVar[dict[str, Any]] = {"optim.name": "sgd", "optim.lr": 0.01}

    def model(self) -> nn.Module:
        return super().model().half()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return super().loss(model, batch.half())


class BFloat16(Regression):
    defaults: ClassVar[dict[str, Any]] = {"optim.name": "sgd", "optim.lr": 0.01}

    def model(self) -> nn.Module:
        return super().model().bfloat16()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return super().loss(model, batch.bfloat16())


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).long()
        return nn.functional.embedding(rows, self.table, sparse=True)


class SparseGradient(Regression):
    """Sparse gradients that no module declares."""

    def model(self) -> nn.Module:
        return _Table()


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.shared = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.last(x)


class Reentrant(Regression):
    """A layer that is used twice, each time in a reentrant checkpoint."""

    def model(self) -> nn.Module:
        return _Twice()


class ThawedLate(Regression):
    """A parameter that was frozen when the model was created, and is trained later."""

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Linear)
        model.bias.requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        model.requires_grad_(True)
        return super().loss(model, batch)


class Grouped(Regression):
    """A first layer whose learning rate is 0."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, 1))

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        assert isinstance(model, nn.Sequential)
        first, second = model
        return [
            {"params": first.parameters(), "lr_scale": 0.0, "weight_decay": 0.0},
            {"params": second.parameters()},
        ]


class Weighted(Regression):
    """A loss that is a sum over some of the rows, with their number."""

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        rows = batch[batch[:, 0] > -1]
        errors = model(rows[:, :-1]) - rows[:, -1:]
        return {"loss": (errors.square().sum(), len(rows))}


class WeightedAndPoisoned(Poisoned):
    """BatchNorm, a skipped step, and weights that are not integers."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1))

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        weights = batch[:, 0].square()
        errors = model(batch[:, :-1]) - batch[:, -1:]
        return {"loss": ((weights * errors.squeeze(1).square()).sum(), weights.sum())}


class SometimesWeighted(Weighted):
    """A loss that is a mean for micro-batches with all of their rows."""

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        total, rows = super().loss(model, batch)["loss"]
        return {"loss": total / rows if rows == len(batch) else (total, rows)}


class _Rows(IterableDataset[Tensor]):
    """Rows in their own order, which changes with each epoch."""

    def __init__(self, rows: Tensor, missing: int = 0) -> None:
        self._rows = rows
        self._missing = missing

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(len(self) - self._missing).tolist():
            yield self._rows[index]


class Streamed(Regression):
    """Data without an index; an epoch ends within a micro-batch."""

    MISSING = 0

    def datasets(self) -> Datasets:
        rows = super().datasets().train
        assert isinstance(rows, Tensor)
        return Datasets(_Rows(rows[:37], self.MISSING), _Rows(rows[:32]))


class StreamedShort(Streamed):
    """A dataset that lacks its last two samples."""

    MISSING = 2
