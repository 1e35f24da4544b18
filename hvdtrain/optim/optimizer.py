"""The optimizer, its learning rate, and its state by parameter name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.errors import UserError
from hvdtrain.optim.algorithms import USES_MUON, Lion, MuonAndAdamW, adamw_8bit, muon_parameters
from hvdtrain.optim.config import OptimConfig, ScheduleConfig
from hvdtrain.optim.state_dicts import aligned, check_restored, members, rest_of, set_rest
from hvdtrain.runtime.tensor_shards import difference
from hvdtrain.runtime.wrappers import plain_name

ParamGroup = dict[str, Any]
# Keys that a task's parameter group may have.
_KEYS = ("params", "lr_scale", "weight_decay")


def build_optimizer(
    config: OptimConfig, model: nn.Module, groups: Sequence[ParamGroup] | None = None
) -> Optimizer:
    """Build the optimizer `config.name`.

    Args:
        groups: groups of the parameters, see Task.param_groups; default: matrices decay, vectors
            (biases, norms) do not.

    Raises:
        UserError: the groups do not contain each trainable parameter exactly once, or the model has
            no matrix for Muon.
    """
    if groups is None:
        groups = _by_dimensions(config, model)
    else:
        groups = [{"weight_decay": config.weight_decay, **group} for group in groups]
        groups = [{**group, "params": list(group.get("params", ()))} for group in groups]
        _check_groups(groups, model)
    # Parameters that the task froze are not trained, whatever group they are in.
    groups = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in groups]
    groups = [group for group in groups if group["params"]]
    lr, betas, eps = config.lr, config.betas, config.eps
    fused = config.fused or None  # None is torch's default
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.momentum)
    if config.name == "adam":
        return torch.optim.Adam(groups, lr=lr, betas=betas, eps=eps, fused=fused)
    if config.name == "lion":
        return Lion(groups, lr=lr, betas=betas)
    if config.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr)
    if config.name == "adamw8bit":
        return adamw_8bit(groups, lr, betas, eps)
    if config.name == "muon":
        parts = _by_use_of_muon(groups, model)
        return MuonAndAdamW(parts, lr=lr, momentum=config.momentum, betas=betas, eps=eps)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


def _by_use_of_muon(groups: Sequence[ParamGroup], model: nn.Module) -> list[ParamGroup]:
    if not hasattr(torch.optim, "Muon"):
        raise UserError(f"optim.name muon needs torch 2.9 or newer; this is {torch.__version__}")
    matrices = set(muon_parameters(model))
    parts = []
    for group in groups:
        for uses in (True, False):
            own = [p for p in group["params"] if (p in matrices) is uses]
            parts.append({**group, "params": own, USES_MUON: uses})
    if not any(part["params"] for part in parts if part[USES_MUON]):
        raise UserError(
            "optim.name muon: the model has no matrix to train but embeddings and its output "
            "layer; use optim.name adamw"
        )
    return [part for part in parts if part["params"]]


def _by_dimensions(config: OptimConfig, model: nn.Module) -> list[ParamGroup]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def _check_groups(groups: Sequence[ParamGroup], model: nn.Module) -> None:
    where = "the task's param_groups"
    unknown = sorted({key for group in groups for key in group} - set(_KEYS))
    if unknown:
        raise UserError(f"{where}: unknown key {unknown[0]!r}; there are {', '.join(_KEYS)}")
    names = {parameter: name for name, parameter in model.named_parameters()}
    listed = [parameter for group in groups for parameter in group["params"]]
    if any(parameter not in names for parameter in listed):
        raise UserError(f"{where} have a tensor that is not a parameter of the model")
    counts = Counter(listed)
    for parameter, name in names.items():
        count = counts[parameter]
        if count > 1 or (count == 0 and parameter.requires_grad):
            raise UserError(f"{where} have the parameter {name} {count} times, not once")


def learning_rate(config: ScheduleConfig, peak: float, step: int, steps: int) -> float:
    """Return the rate of one step: a pure function, so there is nothing to save or resume.

    Args:
        config: shape of the schedule.
        peak: rate at the end of the warm-up.
        step: 0 <= step < steps.
        steps: all steps of the run.

    Returns:
        Rises linearly to `peak` in the warm-up; then stays constant, or falls to `peak *
        final_ratio` at the last step (cosine: Loshchilov and Hutter, 2017).
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.name == "constant":
        return peak
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    share = 1 - progress if config.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (config.final_ratio + (1 - config.final_ratio) * share)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set each group's rate: `lr`, times the group's lr_scale if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def parameter_names(optimizer: Optimizer, model: nn.Module) -> dict[nn.Parameter, str]:
    """The `plain_name` of each parameter of the optimizer, in the optimizer's order."""
    names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    return {p: names[p] for group in optimizer.param_groups for p in group["params"]}


def state_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's own tensors (not copies), as "parameter name/entry", and the rest.

    Empty before the first step: no placeholder state is created. Optimizers that are not torch's
    own have a rest, see state_dicts.py.

    Raises:
        UserError: the optimizer's state has a value that cannot be saved.
    """
    names, tensors = parameter_names(optimizer, model), {}
    for parameter, name in names.items():
        entries = optimizer.state.get(parameter, {})
        for entry, value in entries.items() if isinstance(entries, Mapping) else ():
            if isinstance(value, Tensor):
                tensors[f"{name}/{entry}"] = value
    return {**tensors, **rest_of(optimizer, names, tensors)}


def set_state_tensors(optimizer: Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replace the optimizer's state; nothing is changed if it has this state already.

    For torch's own optimizers it does not use `Optimizer.load_state_dict`, which casts and may
    share memory with its argument; here every tensor keeps its dtype.

    Args:
        tensors: as returned by `state_tensors`; moved to their parameter's device, except step
            counts, which torch's optimizers keep on the CPU unless they are fused.

    Raises:
        UserError: the optimizer does not restore it.
    """
    now = partial(state_tensors, optimizer, model)
    if not difference(now(), tensors):
        return
    names = parameter_names(optimizer, model)
    loaded = set_rest(optimizer, names, tensors)
    for member, one in members(optimizer).items():
        if member in loaded:
            continue
        fused = any(group.get("fused") for group in one.param_groups)
        own = {names[p]: p for group in one.param_groups for p in group["params"]}
        state: dict[Tensor, dict[str, Any]] = {}
        for key, tensor in tensors.items():
            name, _, entry = key.rpartition("/")
            if name in own:
                parameter = own[name]
                placed = tensor if entry == "step" and not fused else tensor.to(parameter.device)
                state.setdefault(parameter, {})[entry] = aligned(placed)
        one.state.clear()
        one.state.update(state)
    check_restored(optimizer, now(), tensors)
