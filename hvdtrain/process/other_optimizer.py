"""The optimizer's state in another trainer's checkpoint, for the optimizer of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.checkpoint.interchange.other_run import OtherRun, StateDict
from hvdtrain.checkpoint.spread import as_in
from hvdtrain.checkpoint.weights import Weights
from hvdtrain.engine.state import RunState
from hvdtrain.errors import UserError
from hvdtrain.optim.optimizer import parameter_names, set_state_tensors
from hvdtrain.optim.state_dicts import has_rest, members
from hvdtrain.process.initial_weights import converted
from hvdtrain.runtime.tensor_shards import model_tensors
from hvdtrain.text import plural

# Entries that torch's optimizers keep in the shape of their parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def placed_state(optimizer: Optimizer, saved: StateDict, run: OtherRun) -> StateDict:
    """Return an optimizer's state_dict() with its tensors where, and as, the optimizer keeps them.

    As torch's own load_state_dict() does: on the device and in the dtype of their parameter, but
    for counts of steps. They are copies, because the file is mapped.

    Raises:
        UserError: it is of other parameters, or of another kind of optimizer.
    """
    own, theirs = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if own != theirs:
        raise UserError(
            f"the optimizer in {run.path} has groups of {theirs} parameters, and the script's "
            f"{type(optimizer).__name__} has groups of {own}: build the model and the optimizer as "
            "the script that wrote the checkpoint does"
        )
    state = dict(saved["state"])
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    for group, of_file in groups:
        expected = _entries(optimizer, {**of_file, "params": group["params"]})
        for parameter, number in zip(group["params"], of_file["params"], strict=True):
            entries = state.get(number)
            if not isinstance(entries, dict):
                continue
            entries = {entry: value for entry, value in entries.items() if value is not None}
            if expected is not None and entries and set(entries) != expected:
                raise UserError(
                    f"the optimizer in {run.path} keeps {listed(entries)} for each parameter, and "
                    f"{type(optimizer).__name__} {listed(expected)}: it is another optimizer"
                )
            for moment in _MOMENTS:
                _check_shape(entries.get(moment), parameter, f"parameter {number}", run)
            state[number] = {
                entry: _like(value, parameter, entry, of_file) for entry, value in entries.items()
            }
    return {**saved, "state": state}


def _check_shape(moment: object, parameter: Tensor, name: str, run: OtherRun) -> None:
    if isinstance(moment, Tensor) and moment.shape != parameter.shape:
        raise UserError(
            f"the optimizer in {run.path} has a tensor of shape {list(moment.shape)} for {name}, "
            f"whose shape is {list(parameter.shape)} here: it is of another model, or its "
            "parameters have another order"
        )


def _like(value: Any, parameter: Tensor, entry: str, group: Mapping[str, Any]) -> Any:
    """Return a copy of a value of a parameter's state, where the optimizer expects it."""
    if not isinstance(value, Tensor):
        return value
    if entry == "step":
        on_device = group.get("fused") or group.get("capturable")
        return value.to(parameter.device if on_device else "cpu", copy=True)
    dtype = parameter.dtype if value.is_floating_point() else value.dtype
    return value.to(parameter.device, dtype, copy=True)


def _entries(optimizer: Optimizer, group: Mapping[str, Any]) -> set[str] | None:
    """Names of what an optimizer of torch or of hvdtrain keeps for each parameter of a group.

    None: they differ between parameters, or are unknown.
    """
    if has_rest(optimizer) or not group["params"]:
        return None
    options = {name: value for name, value in group.items() if name != "params"}
    found: set[str] | None = None
    for dims in {p.dim() for p in group["params"]}:
        tiny = nn.Parameter(torch.ones([1] * dims))
        tiny.grad = torch.zeros_like(tiny)
        try:
            make: Any = type(optimizer)
            probe = make([{**options, "params": [tiny], "fused": None}])
            probe.step()
        except (TypeError, ValueError, RuntimeError, LookupError, AssertionError):
            return None
        entries = {entry for entry, value in probe.state[tiny].items() if value is not None}
        if found is not None and entries != found:
            return None
        found = entries
    return found


def load_by_name(state: RunState, run: OtherRun) -> None:
    """Load an optimizer's tensors by the names of the parameters."""
    tensors = run.by_name if run.by_name is not None else _named(run)
    entries: dict[str, dict[str, Tensor]] = {}
    shapes = {name: tensor.shape for name, tensor in run.weights.tensors.items()}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        entries.setdefault(entry, {})[name] = tensor
        if tensor.numel() > 1:  # weights may be saved in other pieces
            shapes.setdefault(name, tensor.shape)
    found: dict[str, dict[str, Tensor]] = {}
    for entry, own in entries.items():
        for name, tensor in _renamed(state, run.weights.facts, own, shapes, entry).items():
            found.setdefault(name, {})[entry] = tensor
    parameters = {name: p for p, name in parameter_names(state.optimizer, state.model).items()}
    if differing := sorted(found.keys() ^ parameters.keys()):
        raise UserError(
            f"the optimizer in {run.path} trains other parameters than this run's: "
            f"{plural(len(differing), 'name differs', 'names differ')}, such as {differing[0]}"
        )
    placed: dict[str, Tensor] = {}
    for one in members(state.optimizer).values():
        names = {p: name for name, p in parameters.items()}
        for group in one.param_groups:
            expected = _entries(one, group)
            for parameter in group["params"]:
                name = names[parameter]
                if set(found[name]) != (expected or set(found[name])):
                    raise UserError(
                        f"the optimizer in {run.path} keeps {listed(found[name])} for {name}, and "
                        f"{type(one).__name__} {listed(expected or ())}: set optim.name to the "
                        "optimizer that the run had"
                    )
                for entry, tensor in found[name].items():
                    if entry in _MOMENTS:
                        _check_shape(tensor, parameter, name, run)
                    placed[f"{name}/{entry}"] = _like(tensor, parameter, entry, group)
    set_state_tensors(state.optimizer, state.model, placed)


def _named(run: OtherRun) -> dict[str, Tensor]:
    """Name the parameters of a numbered state: "name/entry" -> tensor."""
    if run.numbering is None:
        raise UserError(
            f"only the script that wrote {run.path} knows which parameter its optimizer's numbers "
            "mean: continue in this script, with hvdtrain.training(..., takeover=...); or begin a "
            "run with its weights alone (run.init_from)"
        )
    [saved] = run.optimizers
    groups, numbers = run.numbering(), [group["params"] for group in saved["param_groups"]]
    sizes, theirs = [len(one) for one in groups], [len(one) for one in numbers]
    if sizes != theirs:
        raise UserError(
            f"the optimizer in {run.path} has groups of {theirs} parameters, and this version of "
            f"{run.trainer} makes groups of {sizes}: it had an optimizer of its own, or trained "
            "only some parameters; continue in its script, hvdtrain.training(..., takeover=...)"
        )
    return {
        f"{name}/{entry}": value
        for own, of_group in zip(groups, numbers, strict=True)
        for name, number in zip(own, of_group, strict=True)
        for entry, value in saved["state"].get(number, {}).items()
        if isinstance(value, Tensor)
    }


def _renamed(
    state: RunState,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    entry: str,
) -> dict[str, Tensor]:
    """Give one entry of all parameters, such as "exp_avg", the names and layouts of this model.

    Such a tensor is split and transposed as its parameter is. A number, such as a count of steps,
    is repeated for that.

    Raises:
        UserError: a tensor is neither.
    """
    own = as_in(state.model, tensors)
    if own.keys() <= model_tensors(state.model).keys():
        return own
    single = all(tensor.numel() == 1 for tensor in tensors.values())
    wrong = [n for n, t in tensors.items() if not single and t.shape != shapes.get(n, t.shape)]
    if wrong:
        raise UserError(
            f"the optimizer's {entry} of {wrong[0]} has the shape "
            f"{list(tensors[wrong[0]].shape)}, which is not that of its parameter: it cannot be "
            "converted to this model's names"
        )
    if single:
        tensors = {n: t.reshape(()).expand(shapes[n]) for n, t in tensors.items() if n in shapes}
    found = as_in(state.model, converted(state.model, Weights(dict(tensors), dict(facts))))
    return {n: t.flatten()[0].clone() for n, t in found.items()} if single else found


def listed(values: Iterable[Any]) -> str:
    """Format different values, such as "0.0 and 0.1"."""
    return " and ".join(sorted(map(str, values))) or "nothing"
