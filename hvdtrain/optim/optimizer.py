"""The optimizer, and its state by parameter name: for checkpoints and for broadcasts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.optim.config import OptimConfig


def build_optimizer(config: OptimConfig, model: nn.Module) -> Optimizer:
    """AdamW or SGD; matrices decay, vectors (biases, norms) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)


def parameter_names(optimizer: Optimizer, model: nn.Module) -> dict[nn.Parameter, str]:
    """The model's name of each parameter of the optimizer, in the optimizer's order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {p: names[p] for group in optimizer.param_groups for p in group["params"]}


def state_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's own tensors (not copies), as "parameter name/entry".

    Empty before the first step: nothing is synthetic to fill it.

    Raises:
        TypeError: the optimizer keeps something that is not a tensor.
    """
    tensors = {}
    for parameter, name in parameter_names(optimizer, model).items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TypeError(f"{type(optimizer).__name__} keeps {entry} as {type(value)}")
            tensors[f"{name}/{entry}"] = value
    return tensors


def set_state_tensors(optimizer: Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replaces the optimizer's state.

    Not through `Optimizer.load_state_dict`, which casts and may share memory with its
    argument; here every tensor keeps its dtype.

    Args:
        tensors: as `state_tensors` gives them; moved to their parameter's device, but for step
            counts, which torch's optimizers keep on the CPU.
    """
    by_name = {name: p for p, name in parameter_names(optimizer, model).items()}
    state: dict[Tensor, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        parameter = by_name[name]
        placed = tensor if entry == "step" else tensor.to(parameter.device)
        state.setdefault(parameter, {})[entry] = placed
    optimizer.state.clear()
    optimizer.state.update(state)
