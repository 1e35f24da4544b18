"""Training steps with frozen parameters, non-finite gradients and weighted losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig
from hvdtrain.engine.accumulate import Accumulate
from hvdtrain.engine.step import Flags, StepResult, TrainStep, Update
from hvdtrain.exchange.base import Exchange
from hvdtrain.exchange.dense import DenseExchange
from hvdtrain.exchange.exact import exact_exchange
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import build_optimizer, state_tensors
from hvdtrain.runtime.collectives import AgreedError, gather_json
from hvdtrain.runtime.mesh import Group, Topology
from hvdtrain.tasks import Datasets
from tests.support.contexts import replicated
from tests.support.stepping import take_step
from tests.support.unusual import Rebound

WIDTH = 8


class _Task:
    """A task whose loss freezes and unfreezes the first layer as configured."""

    def __init__(self, when: str) -> None:
        self.when = when
        self.frozen = False

    def datasets(self) -> Datasets:
        raise NotImplementedError

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        return nn.Sequential(*layers).double()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        assert isinstance(model, nn.Sequential)
        if not self.frozen or self.when == "before the forward pass":
            model[0].requires_grad_(not self.frozen)
        loss = model(batch).square().mean()
        model[0].requires_grad_(not self.frozen)
        return {"loss": loss}


def _batch(step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def _step(
    task: Any,
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: int,
    topology: Topology,
    exact: bool = False,
) -> TrainStep:
    context = replicated(topology)
    exchange: Exchange
    if exact:
        exchange = exact_exchange(optimizer, model, micro_batches)
    else:
        exchange = DenseExchange(optimizer, model)
    return TrainStep(
        Accumulate(task, model, micro_batches, context, exact),
        exchange,
        Update(optimizer, exchange, clip_norm=0.1),
        BatchConfig(global_size=4 * micro_batches, micro_size=4),
        context,
    )


def _optimizer(model: nn.Module, name: str) -> Optimizer:
    return build_optimizer(OptimConfig(name=name, weight_decay=0.5), model)  # type: ignore[arg-type]


FROZEN = [False, False, True, True, False, True]  # of each step
SHARES = {"all work": 4, "rank 1 has no micro-batch": 1}


@pytest.mark.parametrize("when", ["before the forward pass", "after the forward pass"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon", "adafactor"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("exact", [False, True])
def test_only_frozen_parameters_stay_unchanged(
    topology: Topology, exact: bool, share: str, name: str, when: str
) -> None:
    micro_batches = SHARES[share]
    task = _Task(when)
    model, alone = task.model(), task.model()
    step = _step(task, model, _optimizer(model, name), micro_batches, topology, exact)
    optimizer = _optimizer(alone, name)
    # AdamW divides the rounding of a fixed-point gradient by the gradient's size.
    close = {"rtol": 1e-6, "atol": 1e-6} if exact else {"rtol": 1e-9, "atol": 1e-12}
    for number, frozen in enumerate(FROZEN):
        own = Assignment(micro_batches, Group(topology.rank, topology.world_size))
        task.frozen = frozen
        before = [p.detach().clone() for p in model[0].parameters()]
        take_step(step, (_batch(number, j) for j in own), own, 0.05, Flags(number))
        # A plain loop over all micro-batches, in which only trained parameters have gradients.
        optimizer.zero_grad()
        for j in range(micro_batches):
            (alone(_batch(number, j)).square().mean() / micro_batches).backward()
        for parameter in alone[0].parameters():
            parameter.grad = None if frozen else parameter.grad
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        for group in optimizer.param_groups:
            group["lr"] = 0.05
        optimizer.step()
        for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, **close)
        same = [torch.equal(p, b) for p, b in zip(model[0].parameters(), before, strict=True)]
        assert same == [frozen, frozen]


class _Heads(_Task):
    """Its model has a head that a micro-batch uses if its first number is positive."""

    def __init__(self) -> None:
        pass

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]).double()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        assert isinstance(model, nn.ModuleList)
        hidden = model[0](batch)
        if bool(batch[0, 0] > 0):
            hidden = model[1](hidden)
        return {"loss": hidden.square().mean()}


# Numbers of the micro-batches that use the head, in each step.
USING = [[], [0, 1, 2, 3], [], [3], [0], [1, 2], []]


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("micro_batches", [4, 2, 1])
@pytest.mark.parametrize("exact", [False, True])
def test_head_is_left_alone_in_steps_whose_micro_batches_do_not_use_it(
    topology: Topology, exact: bool, micro_batches: int, name: str
) -> None:
    task = _Heads()
    model, alone = task.model(), task.model()
    step = _step(task, model, _optimizer(model, name), micro_batches, topology, exact)
    optimizer = _optimizer(alone, name)
    close = {"rtol": 1e-6, "atol": 1e-6} if exact else {"rtol": 1e-9, "atol": 1e-12}
    for number, using in enumerate(USING):
        own = Assignment(micro_batches, Group(topology.rank, topology.world_size))
        batches = [_batch(number, j) for j in range(micro_batches)]
        for j, batch in enumerate(batches):
            batch[0, 0] = batch[0, 0].abs() if j in using else -batch[0, 0].abs()
        take_step(step, (batches[j] for j in own), own, 0.05, Flags(number))
        optimizer.zero_grad()
        for batch in batches:
            (task.loss(alone, batch)["loss"] / micro_batches).backward()
        expected = [p.grad is None for p in alone.parameters()]
        assert [p.grad is None for p in model.parameters()] == expected
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        for group in optimizer.param_groups:
            group["lr"] = 0.05
        optimizer.step()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, other, **close)


class _Poisoned(_Task):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(WIDTH), Rebound(), nn.Linear(WIDTH, 1)).double()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": model(batch).square().mean()}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    tensors = {**model.state_dict(), **state_tensors(optimizer, model)}
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


def test_skipped_step_leaves_the_state_of_every_rank_unchanged(topology: Topology) -> None:
    task = _Poisoned("")
    model = task.model()
    micro_batches = 2 * topology.world_size
    optimizer = _optimizer(model, "adamw")
    step = _step(task, model, optimizer, micro_batches, topology)

    def run(number: int, poisoned: bool) -> StepResult:
        own = Assignment(micro_batches, Group(topology.rank, topology.world_size))
        batches = [_batch(number, j) for j in own]
        if poisoned and topology.rank == topology.world_size - 1:
            batches[0][0, 0] = float("nan")
        return take_step(step, iter(batches), own, 0.05, Flags(number))

    assert run(0, poisoned=False).update.applied
    before = _state(model, optimizer)
    assert not run(1, poisoned=True).update.applied
    assert all(gather_json(_state(model, optimizer) == before, "as before"))
    assert run(2, poisoned=False).update.applied
    after = _state(model, optimizer)
    assert after.keys() == before.keys() and all(after[name] != before[name] for name in before)


class _Weighted(_Task):
    """A loss over rows with different numbers of valid values, padded with finite values."""

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        valid = batch[:, 0] > 0
        losses = model(batch).square().squeeze(1)[valid]
        largest = batch.detach().abs().max()
        return {"loss": (losses.sum(), valid.sum()), "largest": largest, "rows": (len(batch), 2)}

    metrics = ("largest", "rows")


@pytest.mark.parametrize("share", SHARES)
def test_weighted_loss_is_averaged_over_the_global_batch(topology: Topology, share: str) -> None:
    micro_batches = SHARES[share]
    task = _Weighted("")
    model, alone = task.model(), task.model()
    step = _step(task, model, _optimizer(model, "sgd"), micro_batches, topology)
    optimizer = _optimizer(alone, "sgd")
    for number in range(3):
        own = Assignment(micro_batches, Group(topology.rank, topology.world_size))
        result = take_step(step, (_batch(number, j) for j in own), own, 0.05, Flags(number))
        batches = [_batch(number, j) for j in range(micro_batches)]
        rows = torch.cat(batches)
        optimizer.zero_grad()
        expected = alone(rows).square().squeeze(1)[rows[:, 0] > 0].mean()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        for group in optimizer.param_groups:
            group["lr"] = 0.05
        optimizer.step()
        assert result.values["loss"] == pytest.approx(float(expected), rel=1e-9)
        largest = sum(float(batch.abs().max()) for batch in batches) / micro_batches
        assert result.values["rows"] == len(batches[0]) / 2
        assert result.values["largest"] == pytest.approx(largest, rel=1e-9)
        for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-9, atol=1e-12)


class _SometimesWeighted(_Weighted):
    """One micro-batch of a step returns a mean, on one rank."""

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        found = super().loss(model, batch)
        if batch[0, 0] == 0:
            found["loss"] = found["loss"][0] / found["loss"][1]
        return found


def test_mix_of_mean_and_weighted_losses_is_refused_on_every_rank(topology: Topology) -> None:
    task = _SometimesWeighted("")
    model = task.model()
    micro_batches = 2 * topology.world_size
    step = _step(task, model, _optimizer(model, "sgd"), micro_batches, topology)
    own = Assignment(micro_batches, Group(topology.rank, topology.world_size))
    batches = [_batch(0, j) for j in own]
    if topology.rank == topology.world_size - 1:
        batches[0][0, 0] = 0
    message = f"'loss' was .sum, weight. for {micro_batches - 1} and a mean for 1 of"
    with pytest.raises(AgreedError, match=message):
        take_step(step, iter(batches), own, 0.05, Flags(0))
