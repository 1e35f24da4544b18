"""bf16-params: bfloat16 parameters whose optimizer steps on float32 masters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import (
    build_optimizer,
    set_learning_rate,
    set_state_tensors,
    state_tensors,
)
from hvdtrain.optim.precision import MasterWeights, to_bfloat16

STEPS, WIDTH = 12, 16


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    model = nn.Sequential(*layers)
    to_bfloat16(model)
    return model


def _backward(model: nn.Module, step: int) -> None:
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch).float().square().mean()
    loss.backward()


def _optimizer(model: nn.Module, name: str) -> MasterWeights:
    return MasterWeights(build_optimizer(OptimConfig(name=name), model))  # type: ignore[arg-type]


def _train(model: nn.Module, optimizer: MasterWeights, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        _backward(model, step)
        set_learning_rate(optimizer, 1e-3 / (step + 1))
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_master_weights_match_plain_loop_bitwise(name: str) -> None:
    model, plain = _model(), _model()
    _train(model, _optimizer(model, name), range(STEPS))

    masters = copy.deepcopy(plain).float()
    optimizer = build_optimizer(OptimConfig(name=name), masters)  # type: ignore[arg-type]
    for step in range(STEPS):
        plain.zero_grad()
        _backward(plain, step)
        for master, parameter in zip(masters.parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        set_learning_rate(optimizer, 1e-3 / (step + 1))
        optimizer.step()
        for master, parameter in zip(masters.parameters(), plain.parameters(), strict=True):
            parameter.data = master.data.to(parameter.dtype)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    dtypes = [p.dtype for p in model.parameters()]
    assert dtypes == [*[torch.bfloat16] * 2, *[torch.float32] * 2, *[torch.bfloat16] * 2]


def test_updates_below_bfloat16_resolution_accumulate() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MasterWeights(torch.optim.SGD([parameter], lr=1e-4))
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    # In bfloat16 1 - 1e-4 is 1, also after a hundred updates.
    assert parameter.item() == pytest.approx(0.99, rel=2**-8) and parameter.item() < 1


def test_master_weights_resume_bitwise_from_checkpoint() -> None:
    model = _model()
    optimizer = _optimizer(model, "adamw")
    _train(model, optimizer, range(STEPS // 2))
    saved = {name: t.clone() for name, t in state_tensors(optimizer, model).items()}
    masters = [t for name, t in saved.items() if name.endswith("/master")]
    assert len(masters) == 4  # BatchNorm's stay in float32
    assert all(t.dtype == torch.float32 for name, t in saved.items() if "step" not in name)
    other = _model()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = _optimizer(other, "adamw")
    set_state_tensors(resumed, other, saved)
    _train(model, optimizer, range(STEPS // 2, STEPS))
    _train(other, resumed, range(STEPS // 2, STEPS))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_schedule_of_the_wrapped_optimizer_applies() -> None:
    model = _model()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = MasterWeights(inner)
    schedule = torch.optim.lr_scheduler.MultiStepLR(inner, [1], gamma=0.0)

    def moves(step: int) -> bool:
        before = [p.detach().clone() for p in model.parameters()]
        _backward(model, step)
        optimizer.step()
        return not all(map(torch.equal, before, model.parameters()))

    assert moves(0)
    schedule.step()
    assert not moves(1) and optimizer.param_groups[0]["lr"] == 0.0
    set_learning_rate(optimizer, 0.5)  # as the schedule of a task
    assert moves(2) and inner.param_groups[0]["lr"] == 0.5


def test_parameter_without_gradient_stays_unchanged_without_master() -> None:
    model = _model()
    optimizer = _optimizer(model, "adamw")
    frozen: Tensor = model[0].weight  # type: ignore[index, assignment]
    before = frozen.detach().clone()
    _backward(model, 0)
    frozen.grad = None
    optimizer.step()
    assert torch.equal(frozen, before) and frozen not in optimizer.state
