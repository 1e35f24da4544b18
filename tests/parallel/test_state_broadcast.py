"""Broadcast of rank 0's state: every rank receives it bitwise."""

from __future__ import annotations

import copy
from typing import get_args, get_type_hints

import horovod.torch as hvd
import pytest
import pytorch_optimizer
import torch
from torch import nn

from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState
from hvdtrain.exchange.dense import DenseExchange
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.ema import Ema
from hvdtrain.optim.optimizer import build_optimizer, state_tensors
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.tensor_shards import model_tensors


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def _state(seed: int, name: str = "adamw") -> RunState:
    model = _model(seed)
    config = OptimConfig(name=name, lr=0.1)  # type: ignore[arg-type]
    optimizer = build_optimizer(config, model)
    DenseExchange(optimizer, model)  # its hooks see the tensors that are trained here
    return RunState(model, optimizer, Progress(), identity={})


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def _trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a state for rank 0 to resume from, made without Horovod."""
    model = _model(3)
    config = OptimConfig(name=name, lr=0.1)  # type: ignore[arg-type]
    optimizer = build_optimizer(config, model)
    _train(model, optimizer, 3)
    return model, optimizer


def _assert_bits(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name


def test_fresh_state_is_broadcast_without_optimizer_state(topology: Topology) -> None:
    state = _state(seed=topology.rank)
    state.broadcast()
    _assert_bits(model_tensors(state.model), model_tensors(_model(0)))
    assert state_tensors(state.optimizer, state.model) == {}


def test_horovods_own_broadcast_still_fills_the_optimizer_state(topology: Topology) -> None:
    # The reason for hvdtrain's own broadcast. If this fails, Horovod's could be used instead.
    state = _state(seed=0)
    hvd.broadcast_optimizer_state(state.optimizer, root_rank=0)
    assert state_tensors(state.optimizer, state.model) != {}


@pytest.mark.parametrize("name", get_args(get_type_hints(OptimConfig)["name"]))
def test_resumed_state_of_rank_0_reaches_every_rank(topology: Topology, name: str) -> None:
    model, optimizer = _trained(name)
    state = _state(seed=topology.rank, name=name)
    if topology.rank == 0:
        resumed = RunState(model, optimizer, Progress(3, 24, 1, 0), identity={})
        state.load(copy.deepcopy(resumed.capture()))
    state.broadcast()
    assert state.progress == Progress(3, 24, 1, 0)
    _assert_bits(model_tensors(state.model), model_tensors(model))
    _assert_bits(state_tensors(state.optimizer, state.model), state_tensors(optimizer, model))


@pytest.mark.parametrize("name", ["Lookahead", "SOAP"])
def test_state_of_other_packages_optimizers_reaches_every_rank(
    topology: Topology, name: str
) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        if name == "SOAP":
            return pytorch_optimizer.SOAP(model.parameters(), lr=0.1)  # type: ignore[no-any-return]
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return pytorch_optimizer.Lookahead(inner, k=2)  # type: ignore[no-any-return]

    expected = _model(3)
    its_optimizer = build(expected)
    _train(expected, its_optimizer, 3)
    if topology.rank == 0:
        model = _model(3)
        optimizer = build(model)
        _train(model, optimizer, 3)
    else:
        model = _model(topology.rank)
        optimizer = build(model)
    RunState(model, optimizer, Progress(), identity={}).broadcast()
    for each in ((model, optimizer), (expected, its_optimizer)):
        _train(*each, 3)
    _assert_bits(model_tensors(model), model_tensors(expected))
    _assert_bits(state_tensors(optimizer, model), state_tensors(its_optimizer, expected))


def test_rank_that_is_a_step_behind_catches_up(topology: Topology) -> None:
    # As after a failure: the same tensors by name and shape, but one step apart.
    model, optimizer = _trained("adamw")
    most_advanced = topology.world_size - 1
    ahead = topology.rank == most_advanced
    state = RunState(model, optimizer, Progress(3 + ahead, 24 + 8 * ahead), identity={})
    progress = state.progress
    if ahead:
        _train(model, optimizer, 1)
    state.broadcast(root=most_advanced)
    assert state.progress == Progress(4, 32) and state.progress is progress
    expected, its_optimizer = _trained("adamw")
    _train(expected, its_optimizer, 1)
    _assert_bits(model_tensors(model), model_tensors(expected))
    _assert_bits(state_tensors(optimizer, model), state_tensors(its_optimizer, expected))


def test_training_continues_identically_after_the_broadcast(topology: Topology) -> None:
    model, optimizer = _trained("adamw")
    state = _state(seed=topology.rank)
    if topology.rank == 0:
        resumed = RunState(model, optimizer, Progress(3, 24), identity={})
        state.load(copy.deepcopy(resumed.capture()))
    state.broadcast()
    other = _model(9)  # the model itself has Horovod's hooks
    other.load_state_dict(state.model.state_dict())
    alone = build_optimizer(OptimConfig(lr=0.1), other)
    alone.load_state_dict(state.optimizer.state_dict())
    _train(other, alone, 2)
    _train(model, optimizer, 2)
    _assert_bits(model_tensors(other), model_tensors(model))


def test_averaged_weights_of_rank_0_reach_every_rank(topology: Topology) -> None:
    model = _model(3)
    optimizer = build_optimizer(OptimConfig(lr=0.1), model)
    ema = Ema(optimizer, model, 0.9)
    _train(model, optimizer, 3)
    expected = {name: tensor.clone() for name, tensor in ema.tensors().items()}
    other = _model(topology.rank)
    fresh = build_optimizer(OptimConfig(lr=0.1), other)
    own = Ema(fresh, other, 0.9)
    state = RunState(other, fresh, Progress(), {}, [own])
    if topology.rank == 0:
        resumed = RunState(model, optimizer, Progress(3, 24, evaluations=[[2, 0.5]]), {}, [ema])
        state.load(copy.deepcopy(resumed.capture()))
    state.broadcast()
    assert state.progress.evaluations == [[2, 0.5]]
    _assert_bits(own.tensors(), expected)
    _train(other, fresh, 1)
    _train(model, optimizer, 1)
    _assert_bits(own.tensors(), ema.tensors())
