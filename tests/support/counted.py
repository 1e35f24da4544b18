"""A task whose exchange keeps state of its own on each rank, like a compressing exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import hvdtrain.exchange.build
from hvdtrain.exchange.dense import DenseExchange
from hvdtrain.runtime.state_part import Scope, StatePart
from tests.support.tasks import Slow


class Counter:
    """Number of steps of a rank; inherited by addition."""

    name = "counter"
    scope: Scope = "local"

    def __init__(self) -> None:
        self.steps = torch.zeros(1, dtype=torch.int64)

    def tensors(self) -> dict[str, Tensor]:
        return {"steps": self.steps}

    def compared(self) -> dict[str, Tensor]:
        return {}

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        self.steps.fill_(sum(int(one["steps"]) for one in saved))


class Counting(DenseExchange):
    """Exchange that counts its steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counter = Counter()

    def reduce(self) -> None:
        super().reduce()
        self._counter.steps += 1

    def state_parts(self) -> Sequence[StatePart]:
        return (self._counter,)


class Counted(Slow):
    """Slow, with an exchange that has local state."""

    def __init__(self) -> None:
        hvdtrain.exchange.build.DenseExchange = Counting  # type: ignore[misc]
