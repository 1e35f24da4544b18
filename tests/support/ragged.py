"""A task with samples of different lengths: `tests.support.ragged:Ragged`."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hvdtrain.tasks import Datasets

WORDS, PADDING = 20, -1
TRAIN, VALIDATION = 150, 30


class Sentences(Dataset[Tensor]):
    """Sample i counts upwards from i, at most WORDS - 1, then from 0 again; 2 to 41 tokens."""

    def __init__(self, samples: int) -> None:
        self.lengths = 2 + np.arange(samples) * 7919 % 40

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return (index + torch.arange(int(self.lengths[index]))) % WORDS


class Ragged:
    """Next-word prediction; the loss is (sum, tokens).

    HVDTRAIN_TEST_PACE: seconds per micro-batch.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "train.duration": 10, "optim.lr": 0.01, "batch.max_tokens": 90, "batch.per_step": 6,
    }  # fmt: skip

    def datasets(self) -> Datasets:
        return Datasets(Sentences(TRAIN), Sentences(VALIDATION), "counting")

    def collate(self, samples: list[Tensor]) -> Tensor:
        """int64 (samples, longest)."""
        return pad_sequence(samples, batch_first=True, padding_value=PADDING)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        assert batch.numel() <= 90, "the budget"
        time.sleep(float(os.environ.get("HVDTRAIN_TEST_PACE", "0")))
        targets = batch[:, 1:]
        scores = model(batch[:, :-1].clamp(min=0)).flatten(0, 1)
        total = cross_entropy(scores, targets.flatten(), ignore_index=PADDING, reduction="sum")
        return {"loss": (total, (targets != PADDING).sum())}


class Averaged(Ragged):
    """Ragged whose loss is a mean."""

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        total, tokens = super().loss(model, batch)["loss"]
        return {"loss": total / tokens}


class Plain(Ragged):
    """Ragged whose samples have no lengths."""

    def datasets(self) -> Datasets:
        rows = torch.zeros(8, 4, dtype=torch.int64)
        return Datasets(rows, rows)  # type: ignore[arg-type]  # a tensor is map-style too
