"""Checkpoints of the Trainer of transformers, and of Accelerate's `save_state`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hvdtrain.checkpoint.interchange.other_run import (
    OtherRun,
    checked_optimizers,
    counted_steps,
    newest_in,
)
from hvdtrain.checkpoint.pickled import UNEXPECTED, Inert, read_pickled
from hvdtrain.checkpoint.weights import Weights, read_weights
from hvdtrain.errors import UserError
from hvdtrain.untrusted import read_json, real

_TRAINER_STATE = "trainer_state.json"


def read_trainer(path: Path) -> OtherRun | None:
    """Read `checkpoint-N` of the Trainer of transformers, or the newest one in `path`.

    Raises:
        UserError: it is not complete.
    """
    if not path.is_dir():
        return None
    left: list[str] = []
    if not (path / _TRAINER_STATE).exists():
        newest = newest_in(path, "checkpoint-", _TRAINER_STATE)
        if newest is None:
            return None
        path, left = newest
    try:
        state = read_json(path / _TRAINER_STATE)
        step = int(state["global_step"])
    except (OSError, *UNEXPECTED) as error:
        raise UserError(f"{path / _TRAINER_STATE} is not the Trainer's: {error}") from None
    if not (path / "optimizer.pt").exists():
        raise UserError(
            f"{path} has no optimizer.pt: it was saved with save_only_model, or sharded by FSDP or "
            "DeepSpeed; its weights alone can begin a run (run.init_from)"
        )
    adapters = path / "adapter_model.safetensors"
    weights = replace(read_weights(adapters), adapters=True) if adapters.exists() else None
    weights = weights or read_weights(path)
    facts = weights.facts
    scheduler = path / "scheduler.pt"
    run = OtherRun(
        trainer=f"transformers' Trainer{_version(facts)}",
        path=path,
        step=step,
        weights=weights,
        optimizers=checked_optimizers(path / "optimizer.pt", [read_pickled(path / "optimizer.pt")]),
        numbering=None if weights.adapters else lambda: _numbering(facts),
        schedulers=[read_pickled(scheduler)] if scheduler.exists() else [],
        left=left,
    )
    _add_order(run, path, state)
    if (path / "scaler.pt").exists():
        run.left.append("the loss scale (scaler.pt)")
    return run


def _version(facts: Mapping[str, Any]) -> str:
    found = facts.get("transformers_version")
    return f" ({found})" if isinstance(found, str) else ""


def _add_order(run: OtherRun, path: Path, state: Mapping[str, Any]) -> None:
    """Note how the Trainer orders samples: transformers/trainer.py, accelerate/data_loader.py."""
    arguments = path / "training_args.bin"
    if not arguments.exists():
        return
    found = _arguments(arguments)
    processes = len([*path.glob("rng_state*.pth")])
    run.clip_norm = real(found.get("max_grad_norm"))
    each, accumulated = state.get("train_batch_size"), found.get("gradient_accumulation_steps")
    if isinstance(each, int) and isinstance(accumulated, int) and processes:
        run.global_size = each * accumulated * processes
    sampler = found.get("accelerator_config")
    options = sampler.state if isinstance(sampler, Inert) else {}
    strategy = found.get("train_sampling_strategy", "random")
    name = strategy.arguments[0] if isinstance(strategy, Inert) and strategy.arguments else strategy
    grouped = found.get("group_by_length") or name != "random"
    if grouped or not options.get("use_seedable_sampler", True) or options.get("split_batches"):
        run.order = "the Trainer's sampler was not its usual one"
        return
    seed = found.get("data_seed") if found.get("data_seed") is not None else found.get("seed")
    run.shuffle_seed = seed if isinstance(seed, int) else None


def _arguments(path: Path) -> dict[str, Any]:
    """Attributes of the TrainingArguments."""
    from hvdtrain.checkpoint.pickled import read_object

    found = read_object(path)
    return found.state if isinstance(found, Inert) else {}


def _numbering(facts: Mapping[str, Any]) -> list[list[str]]:
    """Names of a model's parameters in each group, as the Trainer's optimizer numbers them.

    Raises:
        UserError: transformers is not installed, or does not know the model.
    """
    try:
        import torch
        import transformers
    except ImportError:
        raise UserError(
            "the order of the parameters in the Trainer's optimizer requires transformers: "
            "`pip install 'hvdtrain[transformers]'`"
        ) from None
    try:
        [name] = facts["architectures"]
        config = transformers.CONFIG_MAPPING[facts["model_type"]].from_dict(dict(facts))
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
        # The method does not read its object.
        decayed = {*transformers.Trainer.get_decay_parameter_names(None, model)}
    except UNEXPECTED as error:
        raise UserError(f"config.json describes no model of transformers: {error}") from None
    names = [name for name, _ in model.named_parameters()]
    return [[n for n in names if n in decayed], [n for n in names if n not in decayed]]


def read_accelerate(path: Path) -> OtherRun | None:
    """Read a directory of Accelerate's `save_state`.

    Raises:
        UserError: it is not complete, or has several models.
    """
    if not (path / "optimizer.bin").exists():
        return None
    numbered = {
        kind: sorted(path.glob(f"{kind}*.bin"), key=_number) for kind in ("optimizer", "scheduler")
    }
    models = [*path.glob("model_[0-9]*.safetensors"), *path.glob("pytorch_model_[0-9]*.bin")]
    if models:
        raise UserError(
            f"{path} has several models ({models[0].name}, ...): a run trains one, which may "
            "contain others as modules"
        )
    file = path / "pytorch_model.bin"
    weights = Weights(_of_pickle(file)) if file.exists() else read_weights(path)
    optimizers = checked_optimizers(path, [read_pickled(p) for p in numbered["optimizer"]])
    schedulers = [read_pickled(p) for p in numbered["scheduler"]]
    step = counted_steps(optimizers)
    if step is None:
        raise UserError(
            f"{path} does not say how many steps were done, because its optimizer counts none: "
            "begin a run with its weights alone (run.init_from)"
        )
    known = ("optimizer", "scheduler", "model", "pytorch_model", "random_states", "sampler", "dl_")
    others = sorted(p.name for p in path.iterdir() if not p.name.startswith(known))
    return OtherRun(
        trainer="Accelerate",
        path=path,
        step=step,
        weights=weights,
        optimizers=optimizers,
        schedulers=schedulers,
        order=(
            "save_state does not save it; with use_seedable_sampler it is that of --loader.order "
            "torch, with the seed that torch had in `prepare` as --seed"
        ),
        left=others,
    )


def _of_pickle(path: Path) -> dict[str, Tensor]:
    return {n: t for n, t in read_pickled(path).items() if isinstance(t, Tensor)}


def _number(path: Path) -> int:
    """Number of a file such as optimizer_1.bin."""
    found = re.search(r"_(\d+)$", path.stem)
    return int(found[1]) if found else 0
