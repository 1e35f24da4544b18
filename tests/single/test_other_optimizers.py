"""Optimizers of other packages, and of scripts: their state is what their state_dict() returns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import bitsandbytes
import prodigyopt
import pytest
import pytorch_optimizer as other
import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState
from hvdtrain.errors import UserError
from hvdtrain.optim.several import SeveralOptimizers
from hvdtrain.optim.state_dicts import check_no_rest

Build = Callable[[list[nn.Parameter]], Optimizer]


class Counted(Optimizer):
    """Momentum as tutorials write it: numbers, None and lists in the state, and a global entry."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        total = self.state["global"].setdefault("total", torch.zeros(()))
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, previous=None, sums=[torch.zeros_like(p), 0.0])
                    state["half"] = torch.zeros(p.shape, dtype=torch.float64)
                    state["odd"] = torch.zeros(11, dtype=torch.bfloat16)[::11]
                state["step"] += 1
                state["sums"][0].mul_(0.9).add_(p.grad)
                state["half"].add_(p.grad.double(), alpha=1 / 3)
                state["sums"][1] += float(p.grad.sum())
                state["odd"] += 1
                total.add_(torch.dot(p.grad.flatten(), state["sums"][0].flatten()).abs())
                p.add_(state["sums"][0], alpha=-group["lr"] / (1 + state["step"]))
                p.add_(state["half"].to(p.dtype) / (1 + total), alpha=-group["lr"])
                state["previous"] = p.grad.sign()


class ScaledAdamW(torch.optim.AdamW):
    """torch's optimizer with an attribute that its state_dict has in addition."""

    scale = 1.0

    def step(self, closure: Any = None) -> Any:
        self.scale *= 0.5
        for group in self.param_groups:
            group["lr"] = 0.1 * self.scale
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["scale"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "scale"})


def wrapped(params: list[nn.Parameter]) -> Optimizer:
    inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return other.Lookahead(inner, k=2, pullback_momentum="pullback")  # type: ignore[no-any-return]


def averaged(params: list[nn.Parameter]) -> Optimizer:
    optimizer = other.ScheduleFreeWrapper(torch.optim.SGD(params, lr=0.1))
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def several(params: list[nn.Parameter]) -> Optimizer:
    parts = {"one": Counted(params[:2]), "two": torch.optim.AdamW(params[2:4], lr=0.1)}
    return SeveralOptimizers({**parts, "three": wrapped(params[4:])})


OPTIMIZERS: dict[str, Build] = {
    "Counted": Counted,
    "ScaledAdamW": ScaledAdamW,
    "Lookahead": wrapped,
    "ScheduleFreeWrapper": averaged,
    "TRAC": lambda p: other.TRAC(torch.optim.AdamW(p, lr=0.1)),
    "SOAP": lambda p: other.SOAP(p, lr=0.1, precondition_frequency=2),
    "AdaFactor": lambda p: other.AdaFactor(p, lr=0.1),
    "AggMo": lambda p: other.AggMo(p, lr=0.1),
    "SimplifiedAdEMAMix": lambda p: other.SimplifiedAdEMAMix(p, lr=0.1),
    "A2Grad": lambda p: other.A2Grad(p),
    "Prodigy": lambda p: prodigyopt.Prodigy(p),
    "bitsandbytes AdamW": lambda p: bitsandbytes.optim.AdamW(p, lr=0.1),
    "bitsandbytes AdamW8bit": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=0.1, min_8bit_size=16),
    "several": several,
}


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: Optimizer, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_a_file(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in the memory of a file, which is aligned to 8 bytes."""
    memory = torch.empty(tensor.nbytes + 8, dtype=torch.uint8)[8:]
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def state_of(seed: int, build: Build) -> RunState:
    model = model_of(seed)
    return RunState(model, build([*model.parameters()]), Progress(), identity={})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_continues_bitwise_after_its_state_is_restored(name: str) -> None:
    whole, again = state_of(0, OPTIMIZERS[name]), state_of(1, OPTIMIZERS[name])
    train(whole.model, whole.optimizer, 0, 5)
    saved = copy.deepcopy(whole.capture())
    for part, tensors in saved.parts.items():
        saved.parts[part] = {key: in_a_file(tensor) for key, tensor in tensors.items()}
    again.load(saved)
    expected = train(whole.model, whole.optimizer, 5, 12)
    assert train(again.model, again.optimizer, 5, 12) == expected
    one, other = whole.compared(), again.compared()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", ["Counted", "Lookahead", "several"])
def test_reset_optimizer_begins_again(name: str) -> None:
    state, fresh = state_of(0, OPTIMIZERS[name]), state_of(0, OPTIMIZERS[name])
    train(state.model, state.optimizer, 0, 5)
    state.start_over(model_of(0))
    expected = train(fresh.model, fresh.optimizer, 0, 5)
    assert train(state.model, state.optimizer, 0, 5) == expected


def test_schedulers_still_reach_the_groups_after_a_load() -> None:
    state = state_of(0, OPTIMIZERS["Lookahead"])
    group = state.optimizer.param_groups[0]
    train(state.model, state.optimizer, 0, 2)
    saved = copy.deepcopy(state.capture())
    train(state.model, state.optimizer, 2, 4)
    state.load(saved)
    assert state.optimizer.param_groups[0] is group


def test_optimizer_that_already_has_the_state_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = state_of(0, Counted)
    train(state.model, state.optimizer, 0, 2)
    saved = copy.deepcopy(state.capture())
    monkeypatch.setattr(Counted, "load_state_dict", None)
    state.load(saved)


class Forgetful(Counted):
    """Its load_state_dict does not restore all that its state_dict returns."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})


def test_optimizer_that_does_not_restore_its_state_is_refused() -> None:
    state, again = state_of(0, Forgetful), state_of(0, Forgetful)
    train(state.model, state.optimizer, 0, 1)
    with pytest.raises(UserError, match=r"Forgetful.load_state_dict\(\) does not restore"):
        again.load(copy.deepcopy(state.capture()))


def test_state_that_cannot_be_carried_is_refused() -> None:
    state = state_of(0, Counted)
    train(state.model, state.optimizer, 0, 1)
    with pytest.raises(UserError, match=r"Counted keeps 'global' as dict.*: sharding cannot be"):
        check_no_rest(state.optimizer, "sharding")
    state.optimizer.state[state.model[0].weight]["file"] = object()  # type: ignore[index]
    with pytest.raises(UserError, match=r"Counted.state_dict\(\) has a object"):
        state.capture()
    shampoo = state_of(0, lambda p: other.ScalableShampoo(p, lr=0.1))
    train(shampoo.model, shampoo.optimizer, 0, 1)
    with pytest.raises(UserError, match=r"ScalableShampoo.state_dict\(\) has a PreConditioner"):
        shampoo.capture()


def test_checkpoint_of_tensors_alone_is_still_read() -> None:
    lion = other.Lion  # its checkpoints had no rest before
    state, again = state_of(0, lambda p: lion(p, lr=0.01)), state_of(1, lambda p: lion(p, lr=0.01))
    train(state.model, state.optimizer, 0, 3)
    saved = copy.deepcopy(state.capture())
    for key in [key for key in saved.parts["optimizer"] if key.startswith("state_dict/")]:
        del saved.parts["optimizer"][key]
    again.load(saved)
    for group in again.optimizer.param_groups:
        group.update({k: v for k, v in state.optimizer.param_groups[0].items() if k != "params"})
    expected = train(state.model, state.optimizer, 3, 6)
    assert train(again.model, again.optimizer, 3, 6) == expected
