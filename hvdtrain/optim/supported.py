"""Which models can be trained: what Horovod or the optimizers would refuse in the first step
is one sentence before any work is done, on one process as on many."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvdtrain.errors import UserError

# What Horovod adds up and torch's optimizers step on.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


SPARSE = "gets sparse gradients, which cannot be summed over ranks: use sparse=False"


def check_model(model: nn.Module) -> None:
    """Goes through a model that is to be trained.

    Raises:
        UserError: it has nothing to train, a parameter without shape or content, one to be
            trained of another dtype than `DTYPES`, or an embedding with sparse gradients.
    """
    for name, parameter in model.named_parameters():
        problem = _problem(parameter)
        if problem:
            raise UserError(f"the model's parameter {name} {problem}")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(f"the model's parameter {name}.weight {SPARSE}")
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("the model has no parameter that requires a gradient: nothing to train")


def _problem(parameter: Tensor) -> str:
    if is_lazy(parameter):
        return "has no shape yet: run the model once in the task's model(), on a tensor of zeros"
    if parameter.is_meta:
        return "is on the device meta, so it has no values: make the model on the CPU"
    if parameter.requires_grad and parameter.dtype not in DTYPES:
        kind = str(parameter.dtype).removeprefix("torch.")
        return f"is {kind}, which cannot be trained yet: make it float32, as model.float() does"
    return ""


def check_device(model: nn.Module, device: torch.device) -> None:
    """Whether the model is where it was moved to.

    Raises:
        UserError: a parameter is elsewhere, such as on a second GPU.
    """
    for name, parameter in model.named_parameters():
        if parameter.device != device:
            raise UserError(
                f"the model's parameter {name} is on {parameter.device}, not on {device}: a rank "
                "trains on one device"
            )
