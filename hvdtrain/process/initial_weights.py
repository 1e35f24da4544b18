"""Weights that were trained elsewhere: `run.init_from`, and those of `run.takeover`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.spread import as_in
from hvdtrain.checkpoint.weights import Weights, read_weights
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.models.gpt import GPT
from hvdtrain.models.huggingface import from_huggingface
from hvdtrain.models.name_tables import MEGATRON, to_gpt_names
from hvdtrain.runtime.tensor_shards import model_tensors
from hvdtrain.runtime.wrappers import plain_name

# Names listed in a message.
_NAMED = 8


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
        fit, differences = _copy(model, found)
    except UserError as error:
        raise UserError(f"run.init_from: {error}") from None
    if differences and (strict or not fit):
        hint = "; run.init_strict false loads the others" if fit else "; nothing is left to load"
        raise UserError(f"run.init_from {path}: {_NOT_THIS_MODEL}: {differences}{hint}")
    logger.info("%d tensors from %s; the run begins with them", fit, path)
    if differences:
        logger.warning("run.init_from %s: %s", path, differences)


_NOT_THIS_MODEL = "the weights are not this model's"


def copy_weights(model: nn.Module, found: Weights, where: Path) -> int:
    """Copy weights into a model by name; return the number of tensors.

    Adapters need not have the weights of frozen parameters, which stay as they are.

    Raises:
        UserError: names or shapes do not match the model.
    """
    fit, differences = _copy(model, found)
    if differences:
        raise UserError(f"{where}: {_NOT_THIS_MODEL}: {differences}")
    return fit


@torch.no_grad()
def _copy(model: nn.Module, found: Weights) -> tuple[int, str]:
    """Copy the tensors that fit; return their number, and what differs."""
    tensors = _untied(model, as_in(model, converted(model, found)))
    own = model_tensors(model)
    fit = [name for name in own if name in tensors and tensors[name].shape == own[name].shape]
    other = [name for name in own if name in tensors and name not in fit]
    shapes = [f"{n} {list(tensors[n].shape)} instead of {list(own[n].shape)}" for n in other]
    missing = [name for name in own if name not in tensors]
    if found.adapters:
        trained = {plain_name(n) for n, p in model.named_parameters() if p.requires_grad}
        missing = [name for name in missing if name in trained]
    differences = [
        _listed("missing", missing),
        _listed("unexpected", [name for name in tensors if name not in own]),
        _listed("of another shape", shapes),
    ]
    for name in fit:
        own[name].copy_(tensors[name])
    return len(fit), "; ".join(filter(None, differences))


def converted(model: nn.Module, found: Weights) -> dict[str, Tensor]:
    """Return tensors of another program by the names in a model, as far as they are known."""
    tensors = found.tensors
    if found.adapters:  # PEFT saves them without the name of the adapter
        names = {name.replace(".default", ""): name for name in model_tensors(model)}
        return {names.get(name, name): tensor for name, tensor in tensors.items()}
    if isinstance(model, GPT):
        known = found.facts.get("model_type") in (None, MEGATRON)
        convert = to_gpt_names if known else from_huggingface
        tensors = convert(model.config, found.facts, tensors)
    if model_tensors(model).keys().isdisjoint(tensors):
        return _without_prefix(tensors, model_tensors(model))
    return tensors


def _untied(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without the further names of parameters that are in several modules."""
    own: dict[nn.Parameter, str] = {}
    found = dict(tensors)
    for further, parameter in model.named_parameters(remove_duplicate=False):
        name, further = own.setdefault(parameter, plain_name(further)), plain_name(further)
        if name != further and further in found and _agree(found.get(name), found[further]):
            found[name] = found.pop(further)
    return found


def _agree(one: Tensor | None, other: Tensor) -> bool:
    return one is None or torch.equal(one, other)


def _without_prefix(tensors: Mapping[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    """Remove the name that the model had within another module, such as a LightningModule, or the
    key under which torch.distributed.checkpoint saved it.
    """
    first = next(iter(tensors), "")
    prefixes = [first[: at + 1] for at, letter in enumerate(first) if letter == "."]
    for prefix in prefixes:
        bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        if all(name.startswith(prefix) for name in tensors) and not bare.keys().isdisjoint(own):
            return bare
    return dict(tensors)


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} {what} ({', '.join(sorted(names)[:_NAMED])}{more})"
