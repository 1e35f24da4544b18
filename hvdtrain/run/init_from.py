"""`run.init_from`: start of a new run from weights that were trained elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from hvdtrain.checkpoint.spread import by_names_of_now
from hvdtrain.checkpoint.weights import Weights, read_weights
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.models.gpt import GPT
from hvdtrain.models.huggingface import from_huggingface
from hvdtrain.runtime.parts import model_tensors

# Names listed in a message.
_NAMED = 8


@torch.no_grad()
def load_initial_weights(model: nn.Module, path: str, strict: bool) -> None:
    """Copy weights into a model by name, on one rank, whose state the other ranks receive.

    Args:
        path: as in checkpoint.weights.read_weights.
        strict: names and shapes must match the model. If False, tensors without a match keep their
            initial values from the seed, and a warning lists them.

    Raises:
        UserError: there are no weights, or they do not match the model.
    """
    try:
        found = read_weights(Path(path))
        tensors = by_names_of_now(model)(_converted(model, found))
    except UserError as error:
        raise UserError(f"run.init_from: {error}") from None
    own = model_tensors(model)
    fit = [name for name in own if name in tensors and tensors[name].shape == own[name].shape]
    other = [name for name in own if name in tensors and name not in fit]
    shapes = [f"{n} {list(tensors[n].shape)} instead of {list(own[n].shape)}" for n in other]
    differences = [
        _listed("missing", [name for name in own if name not in tensors]),
        _listed("unexpected", [name for name in tensors if name not in own]),
        _listed("of another shape", shapes),
    ]
    said = "; ".join(filter(None, differences))
    if said and (strict or not fit):
        hint = "; run.init_strict false takes over the rest" if fit else "; nothing is left to load"
        raise UserError(f"run.init_from {path}: the weights are not this model's: {said}{hint}")
    for name in fit:
        own[name].copy_(tensors[name])
    logger.info("%d tensors from %s; the run begins with them", len(fit), path)
    if said:
        logger.warning("run.init_from %s: %s", path, said)


def _converted(model: nn.Module, found: Weights) -> dict[str, torch.Tensor]:
    if isinstance(model, GPT) and "model_type" in found.facts:
        return from_huggingface(model.config, found.facts, found.tensors)
    return found.tensors


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} {what} ({', '.join(sorted(names)[:_NAMED])}{more})"
