"""The dynamic loss scale, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvdtrain.optim.loss_scale import LossScale

FIRST = 2.0**16


def _after(outcomes: list[bool], scale: LossScale) -> list[float]:
    values = []
    for applied in outcomes:
        scale.update(applied)
        values.append(scale.value)
    return values


def test_scale_tolerates_first_overflow_and_halves_at_each_later_one() -> None:
    scale = LossScale()
    assert _after([False, True, False, False], scale) == [FIRST, FIRST, FIRST / 2, FIRST / 4]


def test_scale_doubles_after_1000_consecutive_good_steps() -> None:
    scale = LossScale()
    values = _after([True] * 999 + [False] + [True] * 1000, scale)
    assert values == [FIRST] * 1999 + [2 * FIRST]
    # The scale has grown, so one more overflow is tolerated.
    assert _after([False, False], scale) == [2 * FIRST, FIRST]


def test_scale_stops_at_1_and_skips_there_are_not_overflows() -> None:
    scale = LossScale()
    assert [scale.update(False) for _ in range(17)] == [True] * 17
    assert scale.value == 1.0
    assert not scale.update(False)
    assert scale.value == 1.0


def test_checkpoint_restores_loss_scale_state() -> None:
    scale = LossScale()
    _after([False, *[True] * 600], scale)
    saved = {name: tensor.clone() for name, tensor in scale.tensors().items()}
    other = LossScale()
    other.load([saved])
    outcomes = [True] * 400 + [False, False, False]
    assert _after(outcomes, other) == _after(outcomes, scale)
    other.load(())
    assert other.tensors() == LossScale().tensors()


@pytest.mark.parametrize("passes", [1, 3])
def test_exchange_receives_unscaled_gradients(passes: int) -> None:
    model, plain = nn.Linear(4, 1), nn.Linear(4, 1)
    plain.load_state_dict(model.state_dict())
    scale = LossScale()
    scale.unscale_gradients(model.parameters())
    seen = []
    # As an exchange receives gradients, before they are added.
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    for node in nodes:
        node.register_prehook(lambda gradients: seen.append(gradients[0].clone()))
    for _ in range(passes):
        batch = torch.randn(8, 4)
        scale.scaled(model(batch).square().mean()).backward()
        plain(batch).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert len(seen) == 2 * passes and max(float(g.abs().max()) for g in seen) < 1000


def test_parameters_of_an_ended_run_get_plain_gradients() -> None:
    scale, parameter = LossScale(), torch.ones(2, requires_grad=True)
    scale.unscale_gradients([parameter])
    scale.scaled(parameter.sum()).backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [1.0, 1.0]
    scale.remove_hooks()
    parameter.sum().backward()
    assert parameter.grad.tolist() == [2.0, 2.0]
