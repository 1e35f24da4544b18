"""Local SGD: ranks equal a plain loop over the same number of models in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig
from hvdtrain.engine.accumulate import Accumulate
from hvdtrain.engine.integrity import TensorHash
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState, Snapshot
from hvdtrain.engine.step import Flags, TrainStep, Update
from hvdtrain.exchange.dense import DenseExchange
from hvdtrain.exchange.local_sgd import LocalSgd, Nesterov
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import build_optimizer
from hvdtrain.runtime.collectives import gather_bytes
from hvdtrain.runtime.mesh import Group, Topology
from hvdtrain.tasks import Datasets
from tests.support.contexts import replicated
from tests.support.stepping import take_step

WIDTH, SIZE, LR, CLIP = 8, 4, 0.05, 0.1
EVERY = 3
OUTER = Nesterov(lr=0.7, momentum=0.9)
CLOSE = {"rtol": 1e-6, "atol": 1e-9}


class _Task:
    """A model with a layer that may be frozen; a batch with a NaN has a NaN loss."""

    frozen = False

    def datasets(self) -> Datasets:
        raise NotImplementedError

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        first = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        assert isinstance(model, nn.Sequential)
        model[0].requires_grad_(not self.frozen)
        return {"loss": model(batch).square().mean()}


def _batch(step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(SIZE, WIDTH, generator=generator, dtype=torch.float64)


def _optimizer(model: nn.Module, name: str) -> Optimizer:
    return build_optimizer(OptimConfig(name=name, weight_decay=0.5), model)  # type: ignore[arg-type]


class _Rank:
    """This rank, with the objects of a run."""

    def __init__(
        self, topology: Topology, name: str, micro_batches: int, outer: Nesterov | None = None
    ) -> None:
        self.topology, self.micro_batches = topology, micro_batches
        self.task = _Task()
        model = self.task.model()
        optimizer = _optimizer(model, name)
        self.exchange = LocalSgd(optimizer, model, micro_batches, EVERY, outer)
        parts = self.exchange.state_parts()
        self.state = RunState(model, optimizer, Progress(), {}, parts)
        self.run_step = _step(self.task, model, optimizer, self.exchange, self)
        self.assignment = Assignment(micro_batches, Group(topology.rank, topology.world_size))

    def step(self, step: int, average: bool, poisoned: bool = False) -> bool:
        """Run a step; return whether it was applied."""
        batches = [_batch(step, j) for j in self.assignment]
        if poisoned and self.topology.rank == self.topology.world_size - 1:
            batches[0][0, 0] = float("nan")
        self.state.progress.step = step + 1
        result = take_step(self.run_step, iter(batches), self.assignment, LR, Flags(step))
        if average:
            self.exchange.average()
        return result.update.applied

    def digests(self) -> set[bytes]:
        """Return the digests of all ranks' states; one digest if they are replicas."""
        return set(gather_bytes(TensorHash()(self.state.compared()), "digests"))

    def copy(self) -> dict[str, Tensor]:
        parts = self.state.parts
        return {f"{p.name}/{k}": t.clone() for p in parts for k, t in p.tensors().items()}


def _step(task: Any, model: nn.Module, optimizer: Optimizer, exchange: Any, rank: Any) -> TrainStep:
    context = replicated(rank.topology)
    return TrainStep(
        Accumulate(task, model, rank.micro_batches, context),
        exchange,
        Update(optimizer, exchange, CLIP),
        BatchConfig(global_size=SIZE * rank.micro_batches, micro_size=SIZE),
        context,
    )


class _Plain:
    """Local SGD and DiLoCo as in their papers: all ranks' models in this process."""

    def __init__(self, name: str, ranks: int, micro_batches: int, outer: Nesterov | None) -> None:
        self.models = [_Task().model() for _ in range(ranks)]
        self.optimizers = [_optimizer(model, name) for model in self.models]
        self.shares = [range(rank, micro_batches, ranks) for rank in range(ranks)]
        self.weights = [len(share) / micro_batches for share in self.shares]
        self.shared = _Task().model()
        self.outer = None
        if outer is not None:
            self.outer = torch.optim.SGD(
                self.shared.parameters(), lr=outer.lr, momentum=outer.momentum, nesterov=True
            )

    def step(self, step: int, average: bool) -> None:
        for model, optimizer, share in zip(self.models, self.optimizers, self.shares, strict=True):
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            for j in share:
                (model(_batch(step, j)).square().mean() / len(share)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for group in optimizer.param_groups:
                group["lr"] = LR
            optimizer.step()
        if average:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for shared, *own in zip(
            self.shared.parameters(), *(m.parameters() for m in self.models), strict=True
        ):
            mean = sum(w * p for w, p in zip(self.weights, own, strict=True))
            if self.outer is None:
                shared.copy_(mean)
            else:
                shared.grad = shared - mean
        if self.outer is not None:
            self.outer.step()
        for model in self.models:
            for parameter, shared in zip(model.parameters(), self.shared.parameters(), strict=True):
                parameter.copy_(shared)
        states = [[*optimizer.state.values()] for optimizer in self.optimizers]
        for entries in zip(*states, strict=True):
            for name in entries[0]:
                if name != "step":
                    values = [entry[name] for entry in entries]
                    mean = sum(w * v for w, v in zip(self.weights, values, strict=True))
                    for value in values:
                        value.copy_(mean)


SHARES = {"all have equal work": 4, "one rank works more": 3, "rank 1 has no micro-batch": 1}


@pytest.mark.parametrize("outer", [None, OUTER], ids=["average", "nesterov"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("share", SHARES)
def test_local_sgd_equals_a_plain_loop_over_models(
    topology: Topology, share: str, name: str, outer: Nesterov | None
) -> None:
    rank = _Rank(topology, name, SHARES[share], outer)
    plain = _Plain(name, topology.world_size, SHARES[share], outer)
    for number in range(4 * EVERY + 1):
        average = (number + 1) % EVERY == 0
        rank.step(number, average)
        plain.step(number, average)
        own = plain.models[topology.rank]
        for parameter, expected in zip(
            rank.state.model.parameters(), own.parameters(), strict=True
        ):
            torch.testing.assert_close(parameter, expected, **CLOSE)
        assert rank.exchange.diverged != average
        alone = topology.world_size == 1
        assert (len(rank.digests()) == 1) == (average or alone)


@pytest.mark.parametrize("share", SHARES)
def test_averaging_after_each_step_equals_steps_with_the_mean_gradient(
    topology: Topology, share: str
) -> None:
    rank = _Rank(topology, "sgd", SHARES[share])
    rank.run_step._update._clip_norm = 0.0  # separate norms for the ranks clip differently
    dense = _Rank(topology, "sgd", SHARES[share])
    model = dense.task.model()
    optimizer = _optimizer(model, "sgd")
    exchange = DenseExchange(optimizer, model)
    step = _step(dense.task, model, optimizer, exchange, dense)
    step._update._clip_norm = 0.0
    for number in range(5):
        rank.step(number, average=True)
        batches = [_batch(number, j) for j in dense.assignment]
        take_step(step, iter(batches), dense.assignment, LR, Flags(number))
        for parameter, expected in zip(
            rank.state.model.parameters(), model.parameters(), strict=True
        ):
            torch.testing.assert_close(parameter, expected, **CLOSE)
    # BatchNorm's statistics come from all micro-batches in each step.
    for buffer, expected_buffer in zip(rank.state.model.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected_buffer, **CLOSE)


def test_nonfinite_step_is_skipped_on_all_ranks(topology: Topology) -> None:
    rank = _Rank(topology, "adamw", 2 * topology.world_size, OUTER)
    assert rank.step(0, average=False)
    before = rank.copy()
    assert not rank.step(1, average=False, poisoned=True)
    assert all(torch.equal(t, before[name]) for name, t in rank.copy().items())
    assert rank.step(2, average=True)
    assert len(rank.digests()) == 1
    before = rank.copy()
    # A period without applied steps: no momentum changes anything.
    assert not rank.step(3, average=True, poisoned=True)
    assert not rank.exchange.diverged
    assert all(torch.equal(t, before[name]) for name, t in rank.copy().items())


def test_averaging_does_not_change_frozen_parameters(topology: Topology) -> None:
    rank = _Rank(topology, "sgd", 3, OUTER)  # weights that are rounded
    rank.step(0, average=False)
    rank.step(1, average=True)
    first = [p.detach().clone() for p in rank.state.model[0].parameters()]  # type: ignore[index]
    rank.task.frozen = True
    for number in range(2, 6):
        rank.step(number, average=number % 2 == 1)
    for parameter, before in zip(rank.state.model[0].parameters(), first, strict=True):  # type: ignore[index]
        assert torch.equal(parameter, before)
    assert len(rank.digests()) == 1


def test_failure_between_averages_restores_the_last_common_state(topology: Topology) -> None:
    rank = _Rank(topology, "adamw", 2 * topology.world_size, OUTER)
    snapshot = Snapshot(rank.state)
    snapshot.keep()  # before the first step, when the optimizer has no state
    beginning = rank.copy()
    for number in range(2):
        rank.step(number, average=False)
    snapshot.restore()
    rank.exchange.abort()
    restored = rank.copy()
    assert restored.keys() == beginning.keys() and rank.state.progress.step == 0
    assert all(torch.equal(t, beginning[name]) for name, t in restored.items())
    for number in range(EVERY):
        rank.step(number, average=number == EVERY - 1)
    snapshot.keep()
    kept = rank.copy()
    digests = []
    for _ in range(2):
        for number in range(EVERY, EVERY + 2):
            rank.step(number, average=False)
        snapshot.restore()
        rank.exchange.abort()
        assert rank.state.progress.step == EVERY and rank.copy().keys() == kept.keys()
        assert all(torch.equal(t, kept[name]) for name, t in rank.copy().items())
        digests.append(rank.digests())
    assert digests[0] == digests[1] and len(digests[0]) == 1
