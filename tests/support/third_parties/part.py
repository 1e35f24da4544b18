"""A part of a third party in training: a small model, its optimizer, and what a script adds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

DURATION = 24  # of a whole run, in steps: schedules and warm-ups end within it
INPUTS, WIDTH = 4, 8

Parameters = list[nn.Parameter]


@dataclass
class Part:
    """A small regression as a script writes it, with a part of a third party.

    Args:
        model: from (n, INPUTS) to (n, 1).
        optimizer: of its parameters.
        state: what a script registers in training.state, by name.
        before: called at the start of each step.
        after: called after each step, with its index.
        results: tensors at the end, in addition to the model's and the optimizer's.
    """

    model: nn.Module
    optimizer: Optimizer
    state: dict[str, Any] = field(default_factory=dict)
    before: Callable[[], object] = lambda: None
    after: Callable[[int], object] = lambda step: None
    results: Callable[[], Sequence[Tensor]] = lambda: ()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x) - y).square().mean()

    def end(self) -> dict[str, Tensor]:
        """Return copies of all tensors that two equal runs must have in common, by name."""
        found = {f"model {name}": tensor for name, tensor in self.model.state_dict().items()}
        found |= {f"result {n}": tensor for n, tensor in enumerate(self.results())}
        rates = [float(group.get("lr", 0)) for group in self.optimizer.param_groups]
        found["learning rates"] = torch.tensor(rates, dtype=torch.float64)
        return {name: t.detach().clone() for name, t in found.items() if isinstance(t, Tensor)}


def package(name: str) -> Any:
    """Import a module of a third party, when the first part needs it."""
    if name.startswith(("timm", "peft", "torchmetrics")):
        _have_torchvision()
    return importlib.import_module(name)


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def with_layer(layer: nn.Module) -> nn.Sequential:
    """A model in which `layer` maps (n, WIDTH) to (n, WIDTH)."""
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), layer, nn.Linear(WIDTH, 1))


def optimizing(build: Callable[[Parameters], Optimizer]) -> Part:
    """The part is an optimizer."""
    model = small_model()
    return Part(model, build([*model.parameters()]))


def layered(layer: nn.Module) -> Part:
    """The part is a layer, or a change of one."""
    model = with_layer(layer)
    return Part(model, torch.optim.AdamW(model.parameters(), lr=0.02))


def _have_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        # PyPI's torchvision does not load its operators into a torch without CUDA, and then cannot
        # be imported. No part calls them.
        for operator in ("nms", "qnms"):
            arguments = "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", arguments)
