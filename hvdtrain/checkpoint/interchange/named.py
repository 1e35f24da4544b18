"""Checkpoints that name the parameters in the state of their optimizer: those of
torch.distributed.checkpoint, as torchtitan and Megatron-LM write them, and DeepSpeed's universal
checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.checkpoint.foreign import (
    DCP_INDEX,
    NOT_WEIGHTS,
    DcpDirectory,
    megatron_arguments,
    newest_of_megatron,
)
from hvdtrain.checkpoint.interchange.other_run import OtherRun, newest_in
from hvdtrain.checkpoint.pickled import UNEXPECTED, first_line, read_object, read_pickled
from hvdtrain.checkpoint.weights import Weights
from hvdtrain.errors import UserError
from hvdtrain.untrusted import real

# torch.distributed.checkpoint.state_dict writes these, with flatten_optimizer_state_dict=True.
_STATE = re.compile(r"(?:optimizer|optim)\.state\.(.+)\.([^.]+)")
_GROUP = re.compile(r"((?:optimizer|optim)\.param_groups\.(.+))\.(betas|eps|weight_decay|momentum)")
_TITAN_STEP = "train_state.step"
_UNIVERSAL = "latest_universal"


def read_dcp_run(path: Path, values: bool = True) -> OtherRun | None:
    """Read a directory of torch.distributed.checkpoint, or the newest `step-N` in `path`.

    Args:
        values: of tensors; False: they are on the meta device, but for single numbers.

    Raises:
        UserError: it is not complete, or has no optimizer.
    """
    if not path.is_dir():
        return None
    incomplete: list[str] = []
    if not (path / DCP_INDEX).exists():
        newest = newest_in(path, "step-", DCP_INDEX)
        if newest is None:
            return None
        path, incomplete = newest
    directory = DcpDirectory(path, values)
    state = {f"{m[1]}/{m[2]}": name for name in directory.names if (m := _STATE.fullmatch(name))}
    if not state:
        raise UserError(
            f"{path} has no state of an optimizer by the names of parameters (optimizer.state.*): "
            "its weights alone can begin a run (run.init_from)"
        )
    wanted = {*state.values()}
    tensors = directory.tensors(lambda name: name in wanted or not NOT_WEIGHTS.match(name))
    by_name = {key: tensors.pop(name) for key, name in state.items() if name in tensors}
    of_titan = directory.value(_TITAN_STEP)
    step = of_titan if isinstance(of_titan, int) else _counted(path, by_name)
    known = ("dataloader.", "train_state.", "lr_scheduler.", "model.", "optim")
    others = {n.partition(".")[0] for n in directory.names if n not in tensors}
    run = OtherRun(
        trainer="torchtitan" if of_titan is not None else "torch.distributed.checkpoint",
        path=path,
        step=step,
        weights=Weights(tensors),
        by_name=by_name,
        options=_dcp_options(directory),
        left=[
            *incomplete,
            *sorted(f"{name}.*" for name in others if not f"{name}.".startswith(known)),
        ],
    )
    if of_titan is not None:
        run.order = "torchtitan reads a stream, whose position is not kept (dataloader.*)"
    return run


def _dcp_options(directory: DcpDirectory) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for name in directory.names:
        if found := _GROUP.fullmatch(name):
            groups.setdefault(found[1], {})[found[3]] = directory.value(name)
    return _different(groups.values())


def _different(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for group in groups:
        if group not in found:
            found.append(group)
    return found


def _counted(path: Path, by_name: dict[str, Tensor]) -> int:
    counts = [int(t) for key, t in by_name.items() if key.endswith("/step") and t.numel() == 1]
    if not counts:
        raise UserError(
            f"{path} does not say how many steps were done: its optimizer counts none, and it has "
            f"no {_TITAN_STEP}"
        )
    return max(counts)


# --- Megatron-LM --------------------------------------------------------------

_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.+)")  # all layers in one tensor, along its first axis
_OF_MEGATRON = re.compile(r"optimizer\.state\.([^.]+)\.(.+)")
_MASTERS = ("fp32_param", "param")  # weights of the optimizer, more precise than the model's


def read_megatron_core(path: Path, values: bool = True) -> OtherRun | None:
    """Read Megatron-LM's checkpoint in its format torch_dist, or the newest one in `path`.

    Args:
        values: as of `read_dcp_run`.

    Raises:
        UserError: it is not complete, or its optimizer does not name parameters.
    """
    path = newest_of_megatron(path) if path.is_dir() else path
    common = path / "common.pt"
    if not common.exists():
        return None
    content, directory = read_pickled(common), DcpDirectory(path, values)
    saved: dict[str, dict[str, Tensor]] = {}
    for name, tensor in directory.tensors(lambda _: True).items():
        found = _OF_MEGATRON.fullmatch(name)
        entry, parameter = found.groups() if found else ("", name)
        saved.setdefault(entry, {}).update(_unstacked(parameter, tensor))
    weights = saved.pop("", {})
    for entry in _MASTERS:
        weights |= saved.pop(entry, {})
    options = content.get("optimizer") or {}
    options = options.get("optimizer", options)
    groups, step = options.get("param_groups"), content.get("iteration")
    if not saved or not isinstance(groups, list) or not isinstance(step, int):
        raise UserError(
            f"{path} has no iteration, or no optimizer that names its parameters: with "
            "Megatron-LM's distributed optimizer save with --dist-ckpt-optim-fully-reshardable"
        )
    count = (options.get("state") or {}).get("common_step", groups[0].get("step", step))
    by_name = {f"{n}/{entry}": t for entry, own in saved.items() for n, t in own.items()}
    for name in next(iter(saved.values())):
        by_name[f"{name}/step"] = torch.tensor(float(count))
    known = ("betas", "eps", "weight_decay")
    facts = {**megatron_arguments(content), "model_type": "megatron"}
    batch = facts.get("global_batch_size")
    return OtherRun(
        trainer="Megatron-LM",
        path=path,
        step=step,
        weights=Weights(weights, facts),
        by_name=by_name,
        options=_different([{k: g[k] for k in known if k in g} for g in groups]),
        order="Megatron-LM's order of samples, from its own indices, is not one of hvdtrain's",
        global_size=batch if isinstance(batch, int) else None,
        clip_norm=real(facts.get("clip_grad")),
    )


def _unstacked(name: str, tensor: Tensor) -> dict[str, Tensor]:
    found = _STACKED.fullmatch(name)
    if found is None:
        return {name: tensor}
    return {f"{found[1]}.{layer}.{found[2]}": one for layer, one in enumerate(tensor.unbind())}


# --- DeepSpeed ----------------------------------------------------------------


def read_deepspeed(path: Path) -> OtherRun | None:
    """Read a universal checkpoint of DeepSpeed, or the one that `latest_universal` names.

    Raises:
        UserError: it is not complete, or is a checkpoint that is not converted yet.
    """
    if path.name == _UNIVERSAL and path.is_file():
        path = path.parent
    if (path / _UNIVERSAL).is_file():
        path = path / Path((path / _UNIVERSAL).read_text(errors="replace").strip()).name
    files = sorted(path.glob("*mp_rank_*_model_states.pt"))
    if not (path / "zero").is_dir():
        if files or (path / "latest").is_file():
            raise UserError(
                f"{path} is a checkpoint of DeepSpeed for its number of ranks: convert it with "
                "`python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state "
                "--input_folder DIR/global_stepN --output_folder DIR/global_stepN_universal`, and "
                "name the output"
            )
        return None
    of_stage_3 = all(file.name.startswith("zero_pp_rank_") for file in files)
    if not files or (len(files) > 1 and not of_stage_3):
        raise UserError(f"{path} has {len(files)} files *_model_states.pt: one is expected")
    states, options = read_pickled(files[0]), path / "zero/optimizer_state.pt"
    step = states.get("global_steps")
    if not isinstance(step, int):
        raise UserError(f"{files[0]} has no global_steps: it is not DeepSpeed's")
    shapes: dict[str, Any] = {}
    for one in states.get("param_shapes") or ():
        shapes.update(one)
    weights = {n: t for n, t in (states.get("module") or {}).items() if isinstance(t, Tensor)}
    by_name: dict[str, Tensor] = {}
    for directory in sorted(p for p in (path / "zero").iterdir() if p.is_dir()):
        for file in sorted(directory.glob("*.pt")):
            tensor = _of_universal(file, shapes.get(directory.name))
            if file.stem == "fp32":
                weights[directory.name] = tensor
            else:
                by_name[f"{directory.name}/{file.stem}"] = tensor
    groups, counted, clip_norm = _deepspeed_groups(options)
    for name in {key.rpartition("/")[0] for key in by_name}:
        if counted is not None:
            by_name.setdefault(f"{name}/step", counted.clone())
    if not by_name:
        raise UserError(f"{path}/zero has no state of an optimizer")
    skipped = states.get("skipped_steps")
    known = {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
        *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler"),
        *("random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
        *("ds_config", "ds_version", "universal_checkpoint_info"),
    }
    left = [f"{name!r} of the client's state" for name in sorted(states.keys() - known)]
    left += [f"the {skipped} steps that DeepSpeed skipped count as steps"] if skipped else []
    samples = states.get("global_samples")
    return OtherRun(
        trainer=f"DeepSpeed {states.get('ds_version', '')}".rstrip(),
        path=path,
        step=step,
        weights=Weights(weights),
        by_name=by_name,
        options=groups,
        order=(
            "DeepSpeed does not save it; its own loader orders samples as --loader.order torch "
            "does, with data_parallel_seed as --seed (by default 0)"
        ),
        global_size=samples // step if isinstance(samples, int) and step else None,
        clip_norm=clip_norm,
        left=left,
    )


def _of_universal(file: Path, shape: Any) -> Tensor:
    """Return a parameter's tensor; of stage 3 it is flat."""
    found = read_object(file)
    tensor = found.get("param") if isinstance(found, dict) else found
    if not isinstance(tensor, Tensor):
        raise UserError(f"{file} has no tensor: it is not of a universal checkpoint")
    if shape is None or tensor.shape == shape or tensor.numel() == 1:
        return tensor
    try:
        return tensor.reshape(tuple(shape))
    except UNEXPECTED as error:
        raise UserError(f"{file} does not fit its parameter: {first_line(error)}") from None


def _deepspeed_groups(path: Path) -> tuple[list[dict[str, Any]], Tensor | None, float | None]:
    """Options of the optimizer's groups, the count of its steps, if it is not by parameter, and the
    norm to which gradients were clipped.
    """
    if not path.exists():
        return [], None, None
    found = read_pickled(path)
    inner = found.get("optimizer_state_dict", found)
    groups = [g for g in inner.get("param_groups") or () if isinstance(g, dict)]
    counts = [s["step"] for s in (inner.get("state") or {}).values() if "step" in s]
    counted = counts[0] if counts and isinstance(counts[0], Tensor) else None
    different = _different([{k: v for k, v in g.items() if k != "params"} for g in groups])
    return different, counted, real(found.get("clip_grad"))
