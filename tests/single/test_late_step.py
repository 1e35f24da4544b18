"""Deferred updates: a rank applies an update after all, because another rank has applied it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.loader import StepLoader
from hvdtrain.engine.accumulate import Accumulate
from hvdtrain.engine.config import TrainConfig
from hvdtrain.engine.loop import Interruptions, Loop, Progress, TrainingPlan
from hvdtrain.engine.state import RunState
from hvdtrain.engine.step import TrainStep, Update
from hvdtrain.exchange.base import Exchange, TrainedParameters
from hvdtrain.optim.ema import Ema
from hvdtrain.optim.loss_scale import LossScale
from hvdtrain.parallel.agreement import Agreement
from hvdtrain.runtime.collectives import RankLostError
from hvdtrain.runtime.mesh import ALONE, Topology
from hvdtrain.runtime.signals import StopFlag
from tests.support.contexts import replicated

WIDTH, MICRO_BATCHES, LOST = 4, 2, 3
_TIMES = ("time", "step_seconds", "samples_per_second")


class _Task:
    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": model(batch).square().mean()}


class _Exchange(Exchange):
    """Exchange of one rank; it counts the steps that it committed, as error feedback would."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        super().__init__(TrainedParameters(optimizer, model))
        self.committed: list[bool] = []

    def reduce(self) -> None: ...

    def commit(self, applied: bool) -> None:
        self.committed.append(applied)


class _Loader(StepLoader):
    """The batches of each step; the batches of step `poisoned` are not finite."""

    assignment = Assignment(MICRO_BATCHES, ALONE)

    def __init__(self, poisoned: int) -> None:
        self._poisoned = poisoned

    def next_step(self, step: int) -> Any:
        for number in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(100 * step + number)
            batch = torch.randn(8, WIDTH, generator=generator)
            yield batch * float("nan") if step + 1 == self._poisoned else batch

    def go_back(self, samples: int) -> None:
        raise AssertionError

    def close(self) -> None:
        return


class _Rank:
    """A rank with everything that a step changes."""

    def __init__(self, poisoned: int = 0) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        self.exchange, self.agreement, scale = _Exchange(optimizer, model), Agreement(), LossScale()
        parts = [Ema(optimizer, model, 0.5), scale]
        self.state = RunState(model, optimizer, Progress(), {}, parts)
        context = replicated(Topology(0, 1, 0, 1, ("a",)))
        batch = BatchConfig(global_size=8 * MICRO_BATCHES, micro_size=8)
        task: Any = _Task()
        loader: Any = _Loader(poisoned)
        step = TrainStep(
            Accumulate(task, model, MICRO_BATCHES, context),
            self.exchange,
            Update(optimizer, self.exchange, 0.1, scale),
            batch,
            context,
            agreement=self.agreement,
        )
        train = TrainConfig(duration=10)
        plan = TrainingPlan(
            train, batch, lambda s: 0.1 / (s + 1), lambda s: batch.global_size, 1000
        )
        never = Interruptions(StopFlag(), lambda: False)
        progress, applied = self.state.progress, self.state.applied
        self.loop = Loop(plan, step, loader, progress, applied, [], never, context)

    def run(self, until: int) -> None:
        while self.state.progress.step < until:
            for step in self.loop._one_step():
                step.run()

    def content(self) -> dict[str, Any]:
        """Return a copy of the whole state."""
        found: dict[str, Any] = {
            f"{part.name}/{key}": tensor.clone()
            for part in self.state.parts
            for key, tensor in part.tensors().items()
        }
        progress = dict(vars(self.state.progress))
        record = progress["record"] or {}
        progress["record"] = {name: v for name, v in record.items() if name not in _TIMES}
        committed = [*self.exchange.committed]
        return found | {
            "progress": progress,
            "applied": self.state.applied.count,
            "committed": committed,
        }


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with patch("hvdtrain.parallel.agreement.sum_", lambda values, name: values):
        yield


def _assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else None
        # A record may have NaN.
        assert same or repr(value) == repr(other[name]), (name, value, other[name])


def _lose_agreement(rank: _Rank) -> None:
    def lost(values: Tensor, name: str) -> Tensor:
        raise RankLostError(name)

    with patch("hvdtrain.parallel.agreement.sum_", lost), pytest.raises(RankLostError):
        rank.run(LOST)
    for parameter in rank.exchange.parameters:
        parameter.grad = None  # as Exchange.abort does


@pytest.mark.parametrize("poisoned", [0, LOST], ids=["applied", "skipped"])
def test_deferred_update_advances_all_state(poisoned: int) -> None:
    rank, undisturbed = _Rank(poisoned), _Rank(poisoned)
    for each in (rank, undisturbed):
        each.run(LOST - 1)
    _lose_agreement(rank)
    _assert_equal(rank.content(), undisturbed.content())
    assert rank.agreement.reachable_step(LOST - 1) == LOST
    rank.agreement.catch_up(LOST - 1, newest=LOST)
    undisturbed.run(LOST)
    _assert_equal(rank.content(), undisturbed.content())
    for each in (rank, undisturbed):
        each.run(LOST + 2)
    _assert_equal(rank.content(), undisturbed.content())


def test_step_applied_by_no_rank_is_recomputed() -> None:
    rank, undisturbed = _Rank(), _Rank()
    rank.run(LOST - 1)
    _lose_agreement(rank)
    rank.agreement.catch_up(LOST - 1, newest=LOST - 1)
    for each in (rank, undisturbed):
        each.run(LOST + 1)
    _assert_equal(rank.content(), undisturbed.content())
    assert rank.agreement.reachable_step(LOST + 1) == LOST + 1


class _Norm(Tensor):
    """A norm that records when it is read: on a GPU that waits until the gradients are complete."""

    read = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__bool__, Tensor.__float__, Tensor.item, Tensor.tolist):
            cls.read += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_gradients_are_complete_before_ranks_agree_on_the_update() -> None:
    """A collective on a GPU that is aborted later must not belong to an update that ranks apply."""
    rank = _Rank()
    read: list[int] = []

    def agree(values: Tensor, name: str) -> Tensor:
        read.append(_Norm.read)
        return values

    with (
        patch.object(rank.exchange, "agreed_norm", lambda norm: norm.as_subclass(_Norm)),
        patch("hvdtrain.parallel.agreement.sum_", agree),
    ):
        rank.run(1)
    assert len(read) == 1 and read[0] > 0


@pytest.mark.parametrize("place", ["reduce", "agreed_norm"])
def test_failed_collective_leaves_state_unchanged(place: str) -> None:
    rank = _Rank()
    rank.run(2)
    before = rank.content()
    fault = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    with patch.object(rank.exchange, place, side_effect=fault), pytest.raises(RuntimeError):
        rank.run(3)
    _assert_equal(rank.content(), before)


def _apply_twice(rank: _Rank) -> None:
    rank.state.optimizer.step()


def _leave_out(rank: _Rank) -> None:
    rank.state.progress.step += 1


@pytest.mark.parametrize("fault", [_apply_twice, _leave_out])
def test_step_applied_twice_or_skipped_aborts_rank(fault: Callable[[_Rank], None]) -> None:
    rank = _Rank()
    rank.run(2)
    fault(rank)
    with pytest.raises(RuntimeError, match="a step was applied twice or omitted"):
        rank.run(4)
