"""State that a script registers: what is saved is what it gets back."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.engine.script_state import ScriptState
from hvdtrain.engine.structure import ModelStructure
from hvdtrain.errors import UserError
from hvdtrain.optim.several import SeveralOptimizers
from hvdtrain.runtime.plain_values import json_of

COUNTS = st.dictionaries(st.text(max_size=2) | st.integers(), st.integers(), max_size=3)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.builds(OrderedDict, st.dictionaries(st.text(max_size=3), inner, max_size=3))
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.just(5))
        | st.builds(Counter, COUNTS)
        | st.builds(lambda counts: defaultdict(int, counts), COUNTS)
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


def test_set_is_restored_in_place_and_saved_in_a_fixed_order() -> None:
    one, other = ScriptState(optimizer()), ScriptState(optimizer())
    one.objects["seen"], other.objects["seen"] = {"b", "a", ("c", 2)}, (seen := {"d"})
    sent(one, other)
    assert other.objects["seen"] is seen and seen == {"b", "a", ("c", 2)}
    items = json_of(one.tensors())["objects"]["seen"]
    assert [item for item in items["items"] if isinstance(item, str)] == ["a", "b"]


def sequential(owner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.SequentialLR:
    schedulers = torch.optim.lr_scheduler
    parts = [
        schedulers.LinearLR(owner, 0.1, total_iters=3),
        schedulers.MultiStepLR(owner, [2, 4]),
    ]
    return schedulers.SequentialLR(owner, parts, milestones=[3])


def test_schedule_of_milestones_continues_after_it_is_restored() -> None:
    rates: list[list[float]] = [[], []]
    owners = [optimizer(), optimizer()]
    schedulers = [sequential(owner) for owner in owners]
    states = [ScriptState(owner) for owner in owners]
    for step in range(10):
        for number in range(2 if step >= 2 else 1):
            owners[number].step()
            schedulers[number].step()
            rates[number].append(owners[number].param_groups[0]["lr"])
        if step == 1:
            for state, scheduler in zip(states, schedulers, strict=True):
                state.objects["scheduler"] = scheduler
            sent(*states)
    assert rates[1] == rates[0][2:] and len({*rates[0]}) > 4


class Loaded:
    """An object that counts how often its state is loaded."""

    def __init__(self) -> None:
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1


def test_new_run_writes_nothing_into_its_objects() -> None:
    state, loaded, history = ScriptState(optimizer()), Loaded(), [1]
    lr = state._optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    state.objects |= {"loaded": loaded, "history": history}
    state.begin()
    state.restore()
    assert loaded.loads == 0 and state.objects["history"] is history
    assert state._optimizer.param_groups[0]["lr"] is lr
    history.append(2)  # in a step that is then repeated
    state.restore()
    assert loaded.loads == 1 and state.objects["history"] is history == [1]


def test_lists_dicts_and_tensors_are_restored_in_place() -> None:
    one, other = ScriptState(optimizer()), ScriptState(optimizer())
    one.objects |= {"history": [1, 2, 3], "seen": {"a": [1]}, "queue": torch.arange(3.0)}
    history, inner, queue = [7], list[int](), torch.zeros(3)
    seen = {"a": inner, "b": [2]}
    twice = [inner, inner]
    one.objects["twice"] = [[1], [2]]
    other.objects |= {"history": history, "seen": seen, "queue": queue, "twice": twice}
    sent(one, other)
    assert history == [1, 2, 3] and seen == {"a": [1]} and queue.tolist() == [0, 1, 2]
    assert seen["a"] is inner == [1]
    assert other.objects["twice"] == [[1], [2]], "an object that is there twice is filled once"
    assert all(other.objects[name] is own for name, own in (("history", history), ("seen", seen)))


def test_names_are_added_and_removed_before_the_loop_only() -> None:
    state = ScriptState(optimizer())
    state.objects["best"] = 1.0
    state.begin()
    state.objects["best"] = 2.0
    for change in (
        lambda: state.objects.update(worst=1.0),
        lambda: state.objects.setdefault("worst", 1.0),
        lambda: state.objects.pop("best"),
    ):
        with pytest.raises(UserError, match="inside the loop"):
            change()


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


def test_object_of_another_class_is_refused() -> None:
    one, other = ScriptState(optimizer()), ScriptState(optimizer())
    one.objects["schedule"] = torch.optim.lr_scheduler.ExponentialLR(one._optimizer, 0.9)
    other.objects["schedule"] = torch.optim.lr_scheduler.StepLR(other._optimizer, 3)
    with pytest.raises(UserError, match="was saved as ExponentialLR, but the script registers"):
        sent(one, other)


def test_modes_of_layers_and_frozen_parameters_arrive() -> None:
    states = []
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        states.append(ScriptState(torch.optim.SGD(model.parameters(), lr=0.1)))
        states[-1].structure = ModelStructure(model)
        states[-1].begin()
    one, other = (state.structure for state in states)
    assert one is not None and other is not None
    one._model[1].eval()
    one._model[0].weight.requires_grad_(False)
    sent(*states)
    assert other.evaluating() == ["1"] and other.frozen() == ["0.weight"]
    one._model.train()
    sent(*states)
    assert other.evaluating() == []


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
