"""A plain training loop, without hvdtrain, that is saved and resumed as PyTorch documents it.

https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html. If a part loses state here,
it is not hvdtrain that loses it.
"""

from __future__ import annotations

import io
import random
from typing import Any

import numpy
import torch
from torch import Tensor

from tests.support.third_parties import built
from tests.support.third_parties.part import DURATION, INPUTS, Part


def end_of(name: str, interrupted_after: int | None = None) -> dict[str, Tensor]:
    """Train a part; return the tensors at its end.

    Args:
        interrupted_after: steps after which everything with a state_dict() is saved, and loaded
            into a part that was built again; None: the loop is not interrupted.
    """
    [part] = built([name]).values()
    for step in range(DURATION):
        if step == interrupted_after:
            file = io.BytesIO()
            torch.save(_saved(part), file)
            [part] = built([name], seed=1).values()
            file.seek(0)
            _load(part, torch.load(file, weights_only=False))
        torch.manual_seed(step)
        random.seed(step)
        numpy.random.seed(step)
        x = torch.randn(12, INPUTS)
        part.before()
        part.optimizer.zero_grad()
        part.loss(x, x.sum(1, keepdim=True)).backward()
        part.optimizer.step()
        part.after(step)
    return part.end()


def _saved(part: Part) -> dict[str, Any]:
    state = {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in part.state.items()
    }
    return {"model": part.model.state_dict(), "optimizer": part.optimizer.state_dict(), **state}


def _load(part: Part, saved: dict[str, Any]) -> None:
    part.model.load_state_dict(saved.pop("model"))
    part.optimizer.load_state_dict(saved.pop("optimizer"))
    for name, state in saved.items():
        if hasattr(part.state[name], "load_state_dict"):
            part.state[name].load_state_dict(state)
        else:
            part.state[name][:] = state  # a list
