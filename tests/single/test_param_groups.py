"""Parameter groups that a task defines for the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hvdtrain.errors import UserError
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import build_optimizer, set_learning_rate
from tests.support.runs import losses, run


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def test_group_learning_rate_and_weight_decay_are_applied() -> None:
    first, second = _model()
    groups = [
        {"params": first.parameters(), "lr_scale": 0.1},
        {"params": second.parameters(), "weight_decay": 0.0},
    ]
    optimizer = build_optimizer(OptimConfig(), nn.Sequential(first, second), groups)
    set_learning_rate(optimizer, 0.5)
    found = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(0.05, 0.1), (0.5, 0.0)]


def test_frozen_parameter_in_group_is_accepted_but_not_trained() -> None:
    model = _model()
    model[0].weight.requires_grad_(False)
    groups = [{"params": layer.parameters()} for layer in model]
    optimizer = build_optimizer(OptimConfig(), model, groups)
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p.requires_grad for p in listed) and len(listed) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda groups: groups.pop(), "the parameter 1.weight 0 times"),
        (lambda groups: groups.append(groups[0]), "the parameter 0.weight 2 times"),
        (lambda groups: groups[0].update(lr=3), "unknown key 'lr'"),
        (lambda groups: groups[0].update(params=[nn.Linear(1, 1).weight]), "not a parameter of"),
    ],
)
def test_invalid_groups_are_rejected(change: Any, message: str) -> None:
    model = _model()
    groups = [{"params": list(layer.parameters())} for layer in model]
    change(groups)
    with pytest.raises(UserError, match=message):
        build_optimizer(OptimConfig(), model, groups)


def test_grouped_task_loss_curve_is_independent_of_world_size(tmp_path: Path) -> None:
    curves = []
    for launcher in ("", "gloo:2"):
        root = tmp_path / (launcher[:4] or "one")
        flags = ["--task", "tests.support.unusual:Grouped", "--run.id", "case"]
        flags += ["--run.root", str(root), "--telemetry.port", "0", "--train.duration", "6"]
        flags += ["--batch.global_size", "8", "--batch.micro_size", "2"]
        done = run(root / "output", flags, launcher)
        assert done.returncode == 0, done
        curves.append(losses(root / "case"))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
