"""Checkpoints that a script has written with one call of `torch.save`, such as nanoGPT's ckpt.pt,
and those of PyTorch Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hvdtrain.checkpoint.interchange.other_run import (
    OtherRun,
    StateDict,
    checked_optimizers,
    counted_steps,
)
from hvdtrain.checkpoint.pickled import Inert, read_pickled
from hvdtrain.checkpoint.weights import Weights
from hvdtrain.errors import UserError
from hvdtrain.untrusted import real, shown

_LIGHTNING = "pytorch-lightning_version"
# Names under which scripts save, the usual ones first.
_MODEL = ("model", "model_state_dict", "state_dict", "model_state", "net")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state", "optim_state_dict")
_SCHEDULER = (
    *("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict"),
    "scheduler_state",
)
_STEP = ("global_step", "iter_num", "iteration", "iter", "steps", "step")
_NANOGPT = {"model_args", "iter_num", "best_val_loss"}


def read_script(path: Path) -> OtherRun | None:
    """Read a file of `torch.save`; None if `path` is not a file.

    Raises:
        UserError: it has no model, no optimizer or no number of steps.
    """
    if not path.is_file():
        return None
    content = read_pickled(path)
    if _LIGHTNING in content:
        return _lightning(path, content)
    model, optimizer, scheduler = (
        next((name for name in known if name in content), "")
        for known in (_MODEL, _OPTIMIZER, _SCHEDULER)
    )
    if not model or not optimizer:
        raise UserError(
            f"{path} has {', '.join(sorted(map(str, content))[:8]) or 'nothing'}: the state of a "
            f"model ({', '.join(_MODEL)}) and of its optimizer ({', '.join(_OPTIMIZER)}) are "
            "expected"
        )
    saved = content[optimizer]
    optimizers = checked_optimizers(path, saved if isinstance(saved, list) else [saved])
    saved = content.get(scheduler)
    found = saved if isinstance(saved, list) else [saved]
    schedulers = [one for one in found if isinstance(one, dict)]
    step = _step(path, content, optimizers)
    used = {model, optimizer, scheduler, *_STEP, "epoch"}
    of_nanogpt = content.keys() >= _NANOGPT
    run = OtherRun(
        trainer="nanoGPT" if of_nanogpt else "a PyTorch script",
        path=path,
        step=step,
        weights=Weights(_tensors(path, content[model])),
        optimizers=optimizers,
        schedulers=schedulers,
    )
    if of_nanogpt:
        used |= {*_NANOGPT, "config"}
        run.order = (
            "nanoGPT draws each batch from torch's random numbers, whose state it does not save"
        )
        run.global_size = _nanogpt_batch(content.get("config"))
        config = content.get("config")
        run.clip_norm = real(config.get("grad_clip")) if isinstance(config, Mapping) else None
    if len(schedulers) < len([one for one in found if one is not None]):
        run.left.append(f"{scheduler!r} of the file, which is not a state_dict()")
    run.left += [f"{name!r} of the file" for name in sorted(content.keys() - used, key=str)]
    return run


def _step(path: Path, content: Mapping[str, Any], optimizers: Sequence[StateDict]) -> int:
    """The number of steps; the optimizer has counted fewer if some were skipped."""
    named = {name: _whole(content[name]) for name in _STEP if name in content}
    counted = counted_steps(optimizers)
    for value in named.values():
        if value is not None and (value == counted or (counted is None and value >= 0)):
            return value
    for value in named.values():
        if value is not None and counted is not None and counted < value < 2 * counted:
            return value
    if counted is not None and not named:
        return counted
    said = " and ".join(f"{name} {shown(content[name])}" for name in named) or "no number of steps"
    what = "counted none" if counted is None else f"counted {counted}"
    raise UserError(
        f"{path} does not say how many steps were done: it has {said}, and its optimizer has {what}"
        "; save the number of its steps as global_step"
    )


def _whole(value: Any) -> int | None:
    """A whole number, of Python, numpy or in a tensor; None: it is not."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.dim() == 0):
        value = value.item()
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _nanogpt_batch(config: object) -> int | None:
    """Samples of a step: its `gradient_accumulation_steps` counts all ranks."""
    if not isinstance(config, Mapping):
        return None
    sizes = [config.get(name) for name in ("batch_size", "gradient_accumulation_steps")]
    return sizes[0] * sizes[1] if all(isinstance(one, int) for one in sizes) else None  # type: ignore[operator]


def _lightning(path: Path, content: dict[str, Any]) -> OtherRun:
    optimizers = checked_optimizers(path, content.get("optimizer_states") or ())
    schedulers = content.get("lr_schedulers") or []
    if not optimizers or not isinstance(content.get("state_dict"), dict):
        raise UserError(
            f"{path} has no optimizer or no model: it was saved with save_weights_only; its "
            "weights alone can begin a run"
        )
    # The Trainer counts the steps of all optimizers together.
    counted = content.get("global_step")
    if not isinstance(counted, int):
        raise UserError(f"{path} has no global_step: it is not a complete checkpoint of Lightning")
    names = [str(name).partition("{")[0] for name in content.get("callbacks") or ()]
    left = [f"the state of the callback {name}" for name in names]
    known = {
        *("epoch", "global_step", _LIGHTNING, "state_dict", "loops", "callbacks"),
        *("optimizer_states", "lr_schedulers", "hparams_name", "hyper_parameters"),
        *("datamodule_hparams_name", "datamodule_hyper_parameters", "hparams_type"),
    }
    left += [f"{name!r} of the file" for name in sorted(content.keys() - known)]
    return OtherRun(
        trainer=f"Lightning {content[_LIGHTNING]}",
        path=path,
        step=counted // len(optimizers),
        weights=Weights(_tensors(path, content["state_dict"])),
        optimizers=optimizers,
        schedulers=schedulers,
        order=(
            "Lightning does not save the order of samples; with its DistributedSampler it is that "
            "of --loader.order torch, with PL_GLOBAL_SEED as --seed (without it 0)"
        ),
        left=left,
    )


def _tensors(path: Path, found: Any) -> dict[str, Tensor]:
    """Tensors of a model's state_dict(), without the extra state of modules."""
    if not isinstance(found, Mapping):
        what = "a whole model" if isinstance(found, Inert) else f"a {type(found).__name__}"
        raise UserError(
            f"{path} has {what}, which is not read because it is code: save model.state_dict()"
        )
    return {str(name): tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
