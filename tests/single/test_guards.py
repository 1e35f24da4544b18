"""Which backward passes of a script are refused during a run, and which are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.api.guards import BackwardGuard, DatasetGuard
from hvdtrain.errors import UserError


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A run's model, in the block of a step."""
    trained = nn.Linear(2, 1)
    step: Any = SimpleNamespace(passing=False, open=True)
    guard = BackwardGuard(trained, lambda: step)
    guard.install()
    yield trained
    guard.remove()


def test_other_models_may_run_backward_passes(model: nn.Module) -> None:
    other = nn.Linear(2, 1)
    losses = [other(torch.ones(2)).sum() for _ in range(2)]
    torch.autograd.backward(loss for loss in losses)
    assert torch.equal(other.weight.grad, torch.full((1, 2), 2.0))  # type: ignore[arg-type]
    other.zero_grad()
    other(torch.ones(2)).sum().backward(inputs=other.parameters())
    assert torch.equal(other.weight.grad, torch.ones(1, 2))  # type: ignore[arg-type]


def test_backward_pass_to_the_runs_model_is_refused(model: nn.Module) -> None:
    for backward in (
        lambda: model(torch.ones(2)).sum().backward(),
        lambda: torch.autograd.backward([model(torch.ones(2)).sum()]),
        lambda: model(torch.ones(2)).sum().backward(inputs=iter(model.parameters())),
    ):
        with pytest.raises(UserError, match=r"loss\.backward"):
            backward()
    assert model.weight.grad is None


def test_grad_scaler_is_refused_for_the_runs_model_only(model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(nn.Linear(2, 1)(torch.ones(2)).sum()).backward()
    with pytest.raises(UserError, match="GradScaler"):
        scaler.scale(model(torch.ones(2)).sum())


def test_new_optimizer_of_the_runs_model_is_refused(model: nn.Module) -> None:
    other = nn.Linear(2, 1)
    torch.optim.SGD(other.parameters(), lr=0.1).add_param_group({"params": [torch.ones(1)]})
    with pytest.raises(UserError, match="the loop created AdamW"):
        torch.optim.AdamW([*other.parameters(), *model.parameters()])


class Staged:
    """A dataset with an attribute that a curriculum changes."""

    def __init__(self) -> None:
        self.stage, self.samples = 0, [1, 2, 3]

    def __len__(self) -> int:
        return len(self.samples)


@pytest.mark.parametrize("workers", [0, 2])
def test_changes_of_the_dataset_that_workers_do_not_see_are_refused(workers: int) -> None:
    dataset = Staged()
    guard = DatasetGuard(dataset, workers)
    guard.check()
    dataset.stage = 1
    if workers:
        with pytest.raises(UserError, match="attribute stage was changed"):
            guard.check()
        dataset.stage = 0
    guard.check()
    dataset.samples.append(4)
    with pytest.raises(UserError, match="had 3 samples when the loop began and has 4 now"):
        guard.check()


def test_dataset_without_a_length_is_left_alone() -> None:
    DatasetGuard(iter([1, 2]), 2).check()
