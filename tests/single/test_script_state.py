"""State that a script registers: what is saved is what it gets back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.engine.script_state import ScriptState
from hvdtrain.errors import UserError
from hvdtrain.optim.several import SeveralOptimizers

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def optimizer(lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr)


def sent(state: ScriptState, to: ScriptState) -> None:
    """Send a state as a checkpoint or a broadcast does."""
    state.keep()
    to.load([{name: tensor.clone() for name, tensor in state.tensors().items()}])
    to.restore()


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=4), NESTED, max_size=3))
def test_plain_values_arrive_unchanged(values: dict[str, Any]) -> None:
    one, other = ScriptState(optimizer()), ScriptState(optimizer())
    one.objects.update(values)
    other.objects.update(dict.fromkeys(values))
    sent(one, other)
    assert other.objects == values
    assert repr(other.objects) == repr(one.objects), "1 is not True or 1.0"


def test_objects_tensors_and_learning_rates_arrive_bit_for_bit() -> None:
    states, schedulers = [], []
    for _ in range(2):
        owner = optimizer()
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(owner, 0.9))
        states.append(ScriptState(owner))
        averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 1))
        states[-1].objects |= {"scheduler": schedulers[-1], "average": averaged}
    for _ in range(3):
        states[0]._optimizer.step()
        schedulers[0].step()
    sent(*states)
    rates = [state._optimizer.param_groups[0]["lr"] for state in states]
    assert rates[0] == rates[1] != 0.1
    assert schedulers[0].state_dict() == schedulers[1].state_dict()
    averages = [state.objects["average"].state_dict() for state in states]
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])


def test_other_names_than_were_saved_are_refused() -> None:
    one, other = ScriptState(optimizer()), ScriptState(optimizer())
    one.objects["best"] = 1.0
    with pytest.raises(UserError, match=r"the state of \['best'\], but the script registers none"):
        sent(one, other)


def test_several_optimizers_share_their_groups_and_state() -> None:
    first, second = optimizer(0.1), optimizer(0.2)
    several = SeveralOptimizers({"first": first, "second": second})
    for group in several.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones(2)
    several.step()
    assert several.state.keys() == {
        *first.param_groups[0]["params"],
        *second.param_groups[0]["params"],
    }
    several.state.clear()
    assert not first.state and not second.state
    first.param_groups[0]["lr"] = 0.5
    assert several.param_groups[0]["lr"] == 0.5
    with pytest.raises(UserError, match="the optimizers a and b share a parameter"):
        SeveralOptimizers({"a": first, "b": first})
