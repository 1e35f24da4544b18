"""Parameter groups and named optimizer state, as saved in checkpoints and broadcast."""

from __future__ import annotations

import copy
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState
from hvdtrain.errors import UserError
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import build_optimizer, set_state_tensors, state_tensors

NAMES = get_args(get_type_hints(OptimConfig)["name"])


class Model(nn.Module):
    """Tied and frozen parameters, a convolution, saved and unsaved buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.convolution = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Linear(6, 6, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolution(self.embedding(tokens).transpose(1, 2)))
        return self.head(self.inner(x.transpose(1, 2)))


def _trained(name: str, steps: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    optimizer = build_optimizer(OptimConfig(name=name), model)  # type: ignore[arg-type]
    _train(model, optimizer, steps)
    return model, optimizer


def _train(model: Model, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        tokens = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1) -> RunState:
    return RunState(model, optimizer, Progress(step=3, samples=12), {"seed": seed, "data": "f"})


def test_weight_decay_groups_partition_parameters_by_dimension() -> None:
    model, optimizer = _trained("adamw", 0)
    decay, rest = optimizer.param_groups
    assert decay["weight_decay"] == 0.1 and rest["weight_decay"] == 0.0
    assert all(p.dim() >= 2 for p in decay["params"]) and all(p.dim() < 2 for p in rest["params"])
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_new_optimizer_has_no_state(name: str) -> None:
    model, optimizer = _trained(name, 0)
    assert state_tensors(optimizer, model) == {}


@pytest.mark.parametrize("name", NAMES)
def test_training_continues_identically_after_state_is_restored(name: str) -> None:
    model, optimizer = _trained(name, 3)
    saved = {key: t.clone() for key, t in state_tensors(optimizer, model).items()}
    other = copy.deepcopy(model)
    fresh = build_optimizer(OptimConfig(name=name), other)  # type: ignore[arg-type]
    set_state_tensors(fresh, other, saved)
    again = state_tensors(fresh, other)
    assert again.keys() == saved.keys() and all(torch.equal(again[k], saved[k]) for k in saved)
    _train(model, optimizer, 2)
    _train(other, fresh, 2)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key


def test_number_that_a_script_adds_to_the_state_is_restored() -> None:
    model, optimizer = _trained("adamw", 1)
    optimizer.state[model.convolution.bias]["seen"] = 3
    other, fresh = _trained("adamw", 0)
    set_state_tensors(fresh, other, state_tensors(optimizer, model))
    assert fresh.state[other.convolution.bias]["seen"] == 3


def test_captured_run_state_round_trips() -> None:
    model, optimizer = _trained("adamw", 3)
    checkpoint = copy.deepcopy(_state(model, optimizer).capture())
    assert (
        "table" not in checkpoint.parts["model"] and "head.weight" not in checkpoint.parts["model"]
    )
    assert {"norm.running_mean", "norm.num_batches_tracked"} <= checkpoint.parts["model"].keys()
    torch.manual_seed(1)
    other = Model()
    state = _state(other, build_optimizer(OptimConfig(), other))
    state.progress = Progress()
    state.load(checkpoint)
    assert state.progress == Progress(step=3, samples=12)
    assert other.head.weight is other.embedding.weight
    _train(model, optimizer, 2)
    _train(other, state.optimizer, 2)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key


@pytest.mark.parametrize("change", ["seed", "data", "format", "model"])
def test_checkpoint_of_another_run_is_rejected_before_loading(change: str) -> None:
    model, optimizer = _trained("adamw", 1)
    checkpoint = copy.deepcopy(_state(model, optimizer).capture())
    if change == "model":
        checkpoint.parts["model"]["convolution.bias"] = torch.zeros(5)
    elif change == "format":
        checkpoint.state["format"] = "another"
    else:
        checkpoint.state["identity"][change] = "another"
    before = copy.deepcopy(model.state_dict())
    words = {"model": "convolution.bias", "format": "version"}
    with pytest.raises(UserError, match=words.get(change, change)):
        _state(model, optimizer).load(checkpoint)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
