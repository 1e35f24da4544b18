"""Iterable datasets with a state, and tasks that train on them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from hvdtrain.tasks import Datasets
from tests.support.tasks import Paced, Regression


class Numbers(IterableDataset[Tensor]):
    """Rows (number, and one random number of each generator), in another order in each epoch.

    It continues where its state says, and begins again after the end.

    Args:
        size: samples of a pass.
        log: each sample read is appended to this file, by whichever process reads it.
    """

    def __init__(self, size: int = 13, log: Path | None = None) -> None:
        self.size = size
        self.epoch = self.at = 0
        self._log = log

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        order = np.random.default_rng(self.epoch).permutation(self.size)
        while self.at < self.size:
            number = int(order[self.at])
            self.at += 1
            if self._log is not None:
                with self._log.open("a") as file:
                    file.write(f"{os.getpid()} {self.epoch} {number}\n")
            yield self.sample(number)
        self.at = 0

    def sample(self, number: int) -> Tensor:
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor([100.0 * self.epoch + number, *drawn])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "unused": (b"\0\xff", np.arange(3), torch.ones(2), {1: None})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["unused"][1].tolist() == [0, 1, 2] and state["unused"][3] == {1: None}
        self.at = state["at"]


class KnownLength(Numbers):
    def __len__(self) -> int:
        return self.size


class _Rows(Numbers):
    """Rows of a tensor instead of numbers."""

    def __init__(self, rows: Tensor, log: Path | None) -> None:
        super().__init__(len(rows), log)
        self._rows = rows

    def sample(self, number: int) -> Tensor:
        return self._rows[number]


class _RowsWithLength(_Rows):
    def __len__(self) -> int:
        return self.size


class _RowsWithoutState(_RowsWithLength):
    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Tensor]:
        self.at = 0
        return super().__iter__()


class Endless(Regression):
    """Data that does not know its length; an epoch ends within a micro-batch.

    HVDTRAIN_TEST_LOG names a file to which each sample read is appended.
    """

    KIND: type[_Rows] = _Rows

    def datasets(self) -> Datasets:
        rows = super().datasets().train
        assert isinstance(rows, Tensor)
        log = os.environ.get("HVDTRAIN_TEST_LOG")
        return Datasets(self.KIND(rows[:37], Path(log) if log else None), rows[:8])  # type: ignore[arg-type]


class Saved(Endless):
    """Data with a length and a state."""

    KIND = _RowsWithLength


class Forgotten(Endless):
    """The same data without a state."""

    KIND = _RowsWithoutState


class PacedStream(Saved, Paced):
    """Saved, with steps that last long enough for a fault."""
