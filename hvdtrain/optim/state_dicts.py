"""State of optimizers that are not torch's own: all of what their state_dict() returns.

Tensors that `optimizer.state` has of a parameter keep the name that they have for torch's
optimizers. The rest, with references to these tensors, becomes JSON and further tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.errors import UserError
from hvdtrain.optim.several import SeveralOptimizers
from hvdtrain.runtime.plain_values import JSON, decode, encode, json_of, with_json
from hvdtrain.runtime.tensor_shards import difference

REST = "state_dict/"  # prefix of all entries that are not tensors of a parameter
_STRUCTURE = f"{REST}{JSON}"
_OWN = ("torch.optim.", "hvdtrain.")  # modules of optimizers whose state is tensors of parameters
_ALIGNMENT = 64  # bytes, on CPUs
_PARAMETER, _MODEL = "parameter", "model"  # a parameter; a tensor on the model's device


def members(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers of several by name, or one optimizer."""
    return optimizer.by_name if isinstance(optimizer, SeveralOptimizers) else {"": optimizer}


def has_rest(optimizer: Optimizer) -> bool:
    """Whether an optimizer may have state that is not a tensor of a parameter.

    torch's own optimizers have none, unless a script has added to it. They leave out None.
    """
    if not _is_own(optimizer):
        return True
    return any(
        not isinstance(key, Tensor)
        or any(not (value is None or isinstance(value, Tensor)) for value in of_one.values())
        for key, of_one in optimizer.state.items()
    )


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether an optimizer that is not torch's own defines state_dict() itself."""
    return not _is_own(optimizer) and type(optimizer).state_dict is not Optimizer.state_dict


def _is_own(optimizer: Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith(_OWN)


def check_no_rest(optimizer: Optimizer, what: str) -> None:
    """Raise UserError if an optimizer has state that is not a tensor of a parameter.

    Args:
        what: the feature that requires it.
    """
    for key, of_one in optimizer.state.items():
        entries = of_one.items() if isinstance(key, Tensor) else [(key, of_one)]
        for entry, value in entries:
            if value is not None and not (isinstance(key, Tensor) and isinstance(value, Tensor)):
                raise UserError(
                    f"{type(optimizer).__name__} keeps {entry!r} as {type(value).__name__}, which "
                    f"is not a tensor of a parameter: {what} cannot be used with this optimizer"
                )


def rest_of(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the rest of an optimizer's state; nothing if it has none.

    Args:
        names: names of the parameters.
        tensors: tensors of the parameters by name.

    Raises:
        UserError: it has a value that cannot be saved.
    """
    ours = {name: one for name, one in members(optimizer).items() if has_rest(one)}
    if not ours:
        return {}
    known, more = {id(tensor): key for key, tensor in tensors.items()}, dict[str, Tensor]()
    parameters = {id(parameter): name for parameter, name in names.items()}
    device = next(iter(names)).device
    states: list[Any] = []  # held: ids must stay unique

    def keep(tensor: Tensor) -> dict[str, Any]:
        if id(tensor) in parameters:
            return {"key": parameters[id(tensor)], "of": _PARAMETER}
        if id(tensor) not in known:
            known[id(tensor)] = key = f"{REST}{len(more)}"
            more[key] = tensor.detach()
            states.append(tensor)
        key = known[id(tensor)]
        apart = tensor.device != device or key.endswith("/step")  # as torch's step counts
        found = {"key": key, "of": tensor.device.type if apart else _MODEL}
        return found if tensor.is_contiguous() else {**found, "order": _order(tensor)}

    content = {}
    for name, one in ours.items():
        state = one.state_dict()
        states.append(state)
        content[name] = encode(state, f"{type(one).__name__}.state_dict()", more, keep)
    return {f"{REST}{k}" if k == JSON else k: t for k, t in with_json(content, more).items()}


def set_rest(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    tensors: Mapping[str, Tensor],
) -> set[str]:
    """Load the state of the members that have a rest; return their names.

    Args:
        names: names of the parameters.
        tensors: all of the optimizer's state.

    Raises:
        UserError: an optimizer's load_state_dict() refuses it.
    """
    ours = members(optimizer)
    if _STRUCTURE not in tensors:
        return set()
    content = json_of({JSON: tensors[_STRUCTURE]})
    if unknown := content.keys() - ours.keys():
        raise UserError(f"the checkpoint has the state of other optimizers: {sorted(unknown)}")
    placed: dict[str, Tensor] = {name: parameter for parameter, name in names.items()}
    device = next(iter(names)).device

    def find(found: Mapping[str, Any]) -> Tensor:
        key = found["key"]
        if key not in placed:
            tensor = aligned(tensors[key].to("cpu" if found["of"] == "cpu" else device))
            placed[key] = _in_order(tensor, found["order"]) if "order" in found else tensor
        return placed[key]

    for name, state in content.items():
        load_state_dict(ours[name], decode(state, {}, find))
    return set(content)


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor in memory as torch allocates it, from memory of a file if need be.

    Results of BLAS, such as torch.dot, are rounded differently at other addresses.
    """
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions as they lie in memory: products of matrices round by it."""
    sizes, strides = tensor.shape, tensor.stride()
    return sorted(range(tensor.dim()), key=lambda d: (sizes[d] == 1, -strides[d]))


def _in_order(tensor: Tensor, order: list[int]) -> Tensor:
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def check_restored(
    optimizer: Optimizer, now: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Raise UserError if the state of an optimizer with a rest is not what was loaded."""
    wrong = difference(now, tensors) if _STRUCTURE in tensors else ""
    if wrong:
        what = "its numbers or options" if wrong == _STRUCTURE else wrong
        names = {type(one).__name__ for one in members(optimizer).values() if has_rest(one)}
        raise UserError(
            f"{' or '.join(sorted(names))}.load_state_dict() does not restore what state_dict() "
            f"returned ({what}): a resumed run would differ, so this optimizer cannot be used"
        )


def load_state_dict(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state_dict without a change of dtypes, into the same dicts of the groups.

    Raises:
        UserError: the optimizer refuses it.
    """
    groups = [*optimizer.param_groups]
    try:
        optimizer.load_state_dict(state)
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        name = type(optimizer).__name__
        raise UserError(f"{name}.load_state_dict() refused what was saved: {error}") from None
    # Schedulers, scripts and SeveralOptimizers hold these dicts.
    for old, new in zip(groups, optimizer.param_groups, strict=True):
        if old is not new:
            options = {**new}
            old.clear()
            old.update(options)
    optimizer.param_groups[:] = groups
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    # torch's method casts each tensor to the dtype of its parameter.
    pairs = zip(groups, state["param_groups"], strict=True)
    numbered = {
        number: parameter
        for own, saved in pairs
        for parameter, number in zip(own["params"], saved["params"], strict=True)
    }
    for key, value in state["state"].items():
        optimizer.state[numbered.get(key, key)] = value
