"""get_extra_state() of modules: saved, sent and restored with the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState
from hvdtrain.errors import UserError


class Scaled(nn.Linear):
    """A layer with a scale and a history that are neither parameters nor buffers, as for fp8."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale, self.history = 1.0, torch.zeros(3)

    def get_extra_state(self) -> Any:
        return {"scale": self.scale, "history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.scale, self.history = state["scale"], state["history"]


def state_of(model: nn.Module) -> RunState:
    return RunState(model, torch.optim.SGD(model.parameters(), lr=0.1), Progress(), identity={})


def test_extra_state_of_modules_is_restored() -> None:
    state, again = (state_of(nn.Sequential(Scaled(), nn.Linear(2, 1))) for _ in range(2))
    layer = state.model[0]  # type: ignore[index]
    layer.scale, layer.history = 0.25, torch.arange(3.0)
    again.load(copy.deepcopy(state.capture()))
    restored = again.model[0]  # type: ignore[index]
    assert restored.scale == 0.25 and restored.history.tolist() == [0, 1, 2]
    again.start_over(nn.Sequential(Scaled(), nn.Linear(2, 1)))
    assert restored.scale == 1.0 and restored.history.tolist() == [0, 0, 0]


def test_checkpoint_without_extra_state_is_refused() -> None:
    saved = copy.deepcopy(state_of(Scaled()).capture())
    del saved.parts["extra"]
    with pytest.raises(UserError, match=r"requires the state of .*extra"):
        state_of(Scaled()).load(saved)


def test_extra_state_that_cannot_be_saved_is_refused() -> None:
    model = Scaled()
    model.scale = object()  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"get_extra_state\(\) of '' has a object"):
        state_of(model)


def test_models_without_extra_state_have_no_such_part() -> None:
    assert "extra" not in state_of(nn.Linear(2, 1)).capture().parts
