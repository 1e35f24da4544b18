"""Which parameters are trained, and whether the model can be trained.

Models that Horovod or the optimizers would refuse in the first step raise one sentence before any
work is done, on one process as on many.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvdtrain.errors import UserError

# Dtypes that Horovod sums and torch's optimizers support.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


SPARSE = "gets sparse gradients, which cannot be summed over ranks: use sparse=False"


def check_model(model: nn.Module) -> None:
    """Check a model that is to be trained.

    Raises:
        UserError: it has no parameter to train, a parameter without shape or content, a trainable
            parameter of a dtype not in `DTYPES`, or an embedding with sparse gradients.
    """
    for name, parameter in model.named_parameters():
        problem = _problem(parameter)
        if problem:
            raise UserError(f"the model's parameter {name} {problem}")
    for name, buffer in model.named_buffers():
        if is_lazy(buffer):
            raise UserError(f"the model's buffer {name} {_problem(buffer)}")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(f"the model's parameter {name}.weight {SPARSE}")
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("the model has no parameter that requires a gradient: nothing to train")


def _problem(parameter: Tensor) -> str:
    if is_lazy(parameter):
        return (
            "has no shape yet: run the model once on a tensor of zeros before the optimizer is "
            "created (in a task: in model())"
        )
    if parameter.is_meta:
        return "is on the device meta, so it has no values: create the model on the CPU"
    if parameter.requires_grad and parameter.dtype not in DTYPES:
        kind = str(parameter.dtype).removeprefix("torch.")
        return f"is {kind}, which cannot be trained yet: make it float32, as model.float() does"
    return ""


def check_device(model: nn.Module, device: torch.device) -> None:
    """Check that the model is on its device.

    Raises:
        UserError: a parameter is on another device, such as a second GPU.
    """
    for name, parameter in model.named_parameters():
        if parameter.device != device:
            raise UserError(
                f"the model's parameter {name} is on {parameter.device}, not on {device}: a rank "
                "trains on one device"
            )


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training.

    Args:
        patterns: patterns of their names, with * and ? as in a shell.

    Raises:
        UserError: a pattern matches no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"optim.freeze: {pattern!r} matches no parameter of the model; there are "
                f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
            )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
