"""A task whose exchange has state of each rank's own, as one that compresses would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hvdtrain.exchange.dense import DenseExchange
from hvdtrain.runtime.state_part import Scope, StatePart
from tests.support.tasks import Slow


class Counter:
    """How many steps a rank has done; inherited by addition."""

    name = "counter"
    scope: Scope = "local"

    def __init__(self) -> None:
        self.steps = torch.zeros(1, dtype=torch.int64)

    def tensors(self) -> dict[str, Tensor]:
        return {"steps": self.steps}

    def compared(self) -> dict[str, Tensor]:
        return {}

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        self.steps.fill_(sum(int(piece["steps"]) for piece in pieces))


class Counted(Slow):
    """Slow; DenseExchange counts its steps, for no exchange of ours has state yet."""

    def __init__(self) -> None:
        counter, finish = Counter(), DenseExchange.finish

        def counted(exchange: DenseExchange) -> None:
            finish(exchange)
            counter.steps += 1

        def state_parts(_: DenseExchange) -> Sequence[StatePart]:
            return (counter,)

        DenseExchange.finish = counted  # type: ignore[method-assign]
        DenseExchange.state_parts = state_parts  # type: ignore[method-assign]
