"""Plain values as tensors: state of users' objects in checkpoints, without pickling.

Plain values are numbers, text, bytes, None, tensors and their dtypes, numpy arrays, and collections
of them: lists, tuples, sets, dicts, deques, and collections.Counter, OrderedDict and defaultdict.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain.errors import UserError

JSON = "json"  # name of the tensor that `with_json` adds
_KIND = "__hvdtrain__"  # in JSON: what a dict stands for
# Mappings that keep their type; any other becomes a dict.
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"Counter": Counter, "OrderedDict": OrderedDict}
_FACTORIES: dict[str, Callable[[], Any]] = {
    factory.__name__: factory for factory in (int, float, str, list, dict, set)
}


def with_json(content: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors together with a result of `encode`, whose JSON becomes a tensor of bytes."""
    text = json.dumps(content).encode()
    return {**tensors, JSON: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def json_of(tensors: Mapping[str, Tensor]) -> Any:
    """Return the JSON that `with_json` has added."""
    return json.loads(bytes(tensors[JSON].cpu().numpy()))


def encode(
    value: Any,
    name: str,
    tensors: dict[str, Tensor],
    keep: Callable[[Tensor], dict[str, Any]] | None = None,
) -> Any:
    """Return a value as JSON, with copies of its tensors added to `tensors`.

    Args:
        name: what the value is, for the message.
        keep: called for each tensor instead of copying it; returns what JSON has of it.

    Raises:
        UserError: it holds something that is not plain.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if keep is not None:
            return {_KIND: "tensor", **keep(value)}
        key = f"{len(tensors)}"
        tensors[key] = value.detach().clone()
        return {_KIND: "tensor", "key": key}
    if isinstance(value, list):
        return [encode(item, name, tensors, keep) for item in value]
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": [encode(item, name, tensors, keep) for item in value]}
    if isinstance(value, set):
        # In an order that does not depend on the process: strings hash differently in each.
        items = sorted((encode(item, name, tensors, keep) for item in value), key=json.dumps)
        return {_KIND: "set", "items": items}
    if isinstance(value, deque):
        items = [encode(item, name, tensors, keep) for item in value]
        return {_KIND: "deque", "items": items, "most": value.maxlen}
    if isinstance(value, Mapping):
        kind = _kind_of(value, name)
        if not kind and all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: encode(item, name, tensors, keep) for key, item in value.items()}
        pairs = [[encode(one, name, tensors, keep) for one in pair] for pair in value.items()]
        return {_KIND: "dict", "items": pairs, **kind}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, bytes | bytearray):
        content = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0)
        return {**encode(content, name, tensors, keep), _KIND: "bytes"}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        shape, dtype = list(value.shape), value.dtype.str
        return {**encode(value.tobytes(), name, tensors, keep), _KIND: dtype, "shape": shape}
    item = getattr(value, "item", None)
    if callable(item):  # a scalar of numpy
        return encode(item(), name, tensors, keep)
    raise UserError(
        f"{name} has a {type(value).__name__}, which cannot be saved: give the object state_dict() "
        "and load_state_dict(), of tensors, numbers, text, lists and dicts"
    )


def decode(
    value: Any,
    tensors: Mapping[str, Tensor],
    find: Callable[[Mapping[str, Any]], Tensor] | None = None,
) -> Any:
    """Return the value that `encode` converted.

    Args:
        find: called for each tensor instead of copying it, with the result of `keep`.
    """
    find = find or (lambda found: tensors[found["key"]].clone())
    if isinstance(value, list):
        return [decode(item, tensors, find) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_KIND):
        case None:
            return {key: decode(item, tensors, find) for key, item in value.items()}
        case "tensor":
            return find(value)
        case "tuple":
            return tuple(decode(item, tensors, find) for item in value["items"])
        case "set":
            return {decode(item, tensors, find) for item in value["items"]}
        case "deque":
            return deque([decode(item, tensors, find) for item in value["items"]], value["most"])
        case "dtype":
            return getattr(torch, value["name"])
        case "dict":
            pairs = {decode(k, tensors, find): decode(v, tensors, find) for k, v in value["items"]}
            if "factory" in value:
                return defaultdict(_FACTORIES.get(value["factory"]), pairs)
            return _MAPPINGS.get(value.get("type", ""), dict)(pairs)
    content = find(value).cpu().numpy().tobytes()
    if value[_KIND] == "bytes":
        return content
    return np.frombuffer(content, value[_KIND]).reshape(value["shape"]).copy()


def _kind_of(value: Mapping[Any, Any], name: str) -> dict[str, Any]:
    """Return what JSON has of a mapping's type; nothing for a dict."""
    if isinstance(value, defaultdict):
        factory = value.default_factory
        known = next((text for text, one in _FACTORIES.items() if one is factory), None)
        if known is None and factory is not None:
            raise UserError(
                f"{name} has a defaultdict of {factory}, which cannot be saved: use one of "
                f"{', '.join(_FACTORIES)}"
            )
        return {"factory": known}
    kind = type(value).__name__
    return {"type": kind} if _MAPPINGS.get(kind) is type(value) else {}
