"""Numeric precision of a model's computation: chosen once, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from hvdtrain.errors import UserError
from hvdtrain.optim.config import PrecisionConfig
from hvdtrain.optim.loss_scale import LossScale
from hvdtrain.optim.state_dicts import has_own_state_dict, members
from hvdtrain.runtime.device import set_cuda_kernels

BF16_PARAMS = "bf16-params"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, BF16_PARAMS: torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """See PrecisionConfig.

    Args:
        name: never `auto`.
        loss_scale: for fp16; None for all others.
    """

    name: str = "float32"
    loss_scale: LossScale | None = None

    @property
    def casts(self) -> bool:
        """Whether forward passes run with `autocast`."""
        return self.name in _DTYPES

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Context for a forward pass; backward runs outside of it.

        Also for `bf16-params`: a batch is float32 if the task makes it so, and torch decides for
        each operation whether it needs float32 (losses, norms).
        """
        if not self.casts:
            return nullcontext()
        return torch.autocast(device.type, _DTYPES[self.name])

    def dtype(self, model: nn.Module) -> torch.dtype:
        """Dtype in which the model multiplies matrices."""
        return _DTYPES.get(self.name, next(model.parameters()).dtype)


FLOAT32 = Precision()


def build_precision(config: PrecisionConfig, device: torch.device) -> Precision:
    """Precision that the `precision` keys configure for a device; sets CUDA's float32 mode."""
    if device.type == "cuda":
        set_cuda_kernels(config.tf32, config.cudnn_benchmark)
    name = _of_device(device) if config.name == "auto" else config.name
    return Precision(name, LossScale() if name == "fp16" else None)


def _of_device(device: torch.device) -> str:
    if device.type != "cuda":
        return "float32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def check_parameters(precision: str, model: nn.Module) -> None:
    """Check that the model's parameters can be trained in this precision.

    Args:
        precision: name, never `auto`.

    Raises:
        UserError: they are float16, and true gradients would be too small for it.
    """
    for name, parameter in model.named_parameters() if precision == "fp16" else ():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise UserError(
                f"the model's parameter {name} is float16, and precision.name fp16 needs float32, "
                "as model.float() makes it: only the computation is done in float16"
            )


def to_bfloat16(model: nn.Module) -> None:
    """Convert the float32 parameters to bfloat16.

    Buffers stay float32, as BatchNorm's statistics require, and so do BatchNorm's parameters: its
    kernels require both in one dtype.
    """
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    kept = {parameter for norm in norms for parameter in norm.parameters()}
    for parameter in model.parameters():
        if parameter.dtype == torch.float32 and parameter not in kept:
            parameter.data = parameter.data.bfloat16()


def _not_with_masters(optimizer: Optimizer, why: str) -> str:
    return (
        f"precision.name {BF16_PARAMS}: {type(optimizer).__name__} {why}, which could not be saved "
        "with master weights; use precision.name bf16"
    )


# Master weights: 16-bit parameters whose optimizer updates float32 copies of them.

_SHORT = (torch.float16, torch.bfloat16)


class MasterWeights(Optimizer):
    """Optimizer over a model's parameters that lets an inner optimizer update float32 copies.

    Most updates are smaller than the resolution of bfloat16, so 16-bit parameters alone would not
    change. (Master weights: Micikevicius et al., "Mixed precision training", arXiv:1710.03740.)
    Each step copies the gradients to the masters, steps, and rounds the masters to the parameters.
    Masters are created from the parameters in the first step that updates them.

    `state[parameter]` is the inner optimizer's state and "master": so it is saved, broadcast and
    compared like any optimizer's state.

    Args:
        inner: over the model's parameters; receives masters instead of the 16-bit parameters.
    """

    def __init__(self, inner: Optimizer) -> None:
        for one in members(inner).values():
            if has_own_state_dict(one):
                raise UserError(_not_with_masters(one, "has a state_dict() of its own"))
        super().__init__([{**group} for group in inner.param_groups], defaults={})
        self._inner = inner
        self._options = [{**group} for group in inner.param_groups]  # as of the last step
        inner.state.clear()
        for group in inner.param_groups:
            group["params"] = [
                nn.Parameter(torch.empty_like(p, dtype=torch.float32)) if p.dtype in _SHORT else p
                for p in group["params"]
            ]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step; parameters without a gradient are skipped."""
        moved = []
        groups = self.param_groups, self._inner.param_groups, self._options
        for own, inner, before in zip(*groups, strict=True):
            # The schedule of a script changes the inner groups, that of a task changes these.
            changed = {key for key, value in inner.items() if value is not before.get(key)}
            own.update({key: inner[key] for key in changed - {"params"}})
            inner.update({key: value for key, value in own.items() if key != "params"})
            before.update(inner)
            for parameter, master in zip(own["params"], inner["params"], strict=True):
                if parameter.grad is None:
                    master.grad = None
                else:
                    self._lend(parameter, master)
                    moved.append((parameter, master))
        self._inner.step()
        further = [key for key in self._inner.state if not isinstance(key, Tensor)]
        if further:
            raise UserError(_not_with_masters(self._inner, f"keeps state[{further[0]!r}]"))
        for parameter, master in moved:
            self.state[parameter] = {**self._inner.state[master]}
            if master is not parameter:
                parameter.copy_(master)
                self.state[parameter]["master"] = master.data

    def _lend(self, parameter: Tensor, master: Tensor) -> None:
        """Pass `state` to the inner optimizer; it may have been replaced since the last step."""
        state: dict[str, Any] = {**self.state.get(parameter, {})}
        if master is not parameter and parameter.grad is not None:
            master.data = state.pop("master") if state else parameter.detach().float()
            master.grad = parameter.grad.float()
        self._inner.state[master] = state
