"""Numeric precision of a model's computation: chosen once, for training and for evaluation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # private, see tasks/sync_batchnorm.py

from hvdtrain.errors import UserError
from hvdtrain.optim.config import PrecisionConfig
from hvdtrain.optim.loss_scale import LossScale
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

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Context for a forward pass; backward runs outside of it.

        Also for `bf16-params`: a batch is float32 if the task makes it so, and torch decides for
        each operation whether it needs float32 (losses, norms).
        """
        if self.name not in _DTYPES:
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
        precision: the configured name.

    Raises:
        UserError: they are float16, and true gradients would be too small for it.
    """
    for name, parameter in model.named_parameters() if precision == "fp16" else ():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise UserError(
                f"the model's parameter {name} is float16, and precision.name fp16 needs float32, "
                "as model.float() makes it: the computation alone is done in float16"
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
