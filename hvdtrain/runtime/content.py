"""Digests of arbitrary values by their content, equal in any process."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Set
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hvdtrain.runtime.tensor_shards import flattened

_DEPTH = 8
# Tensors with at most this many elements are described by their numbers.
_FEW = 64
_MOST_NUMBERS = 4096
_Token = bytes | float


class Content(NamedTuple):
    """Content of a value.

    Args:
        digest: of the whole value.
        numbers: its floating-point numbers, in order; None: more than `_MOST_NUMBERS`.
        rest: digest of everything else, so that the numbers of two values can be compared with a
            tolerance.
    """

    digest: str
    numbers: list[float] | None
    rest: str


class TooLargeError(Exception):
    """A value has more items than the limit."""


def content_of(value: Any, most: int | None = None) -> Content:
    """Return the content of a value.

    Collections, tensors, arrays, random generators and objects with attributes are read in depth.
    Of anything else only its type counts: a repr may contain an address.

    Args:
        most: limit of the number of items; a tensor may have 256 times as many elements. None: no
            limit.

    Raises:
        TooLargeError: it has more.
    """
    whole, rest = hashlib.sha256(), hashlib.sha256()
    numbers: list[float] | None = []
    for count, token in enumerate(
        _tokens(value, _DEPTH, sys.maxsize if most is None else 256 * most)
    ):
        if most is not None and count >= most:
            raise TooLargeError
        if isinstance(token, bytes):
            part = len(token).to_bytes(8, "little") + token
            whole.update(part)
            rest.update(part)
            continue
        whole.update(b"float " + repr(token).encode() + b" ")
        if numbers is not None:
            numbers.append(token)
            numbers = numbers if len(numbers) <= _MOST_NUMBERS else None
    return Content(whole.hexdigest()[:16], numbers, rest.hexdigest()[:16])


def digest_of(tensor: Tensor) -> str:
    """Return the digest of a tensor's dtype, shape and bits."""
    return hashlib.sha256(b" ".join(_bits(tensor))).hexdigest()[:16]


def _bits(tensor: Tensor) -> Iterator[bytes]:
    data = tensor.detach().cpu()
    yield f"{data.dtype} {list(data.shape)}".encode()
    if data.layout is torch.strided:
        yield flattened(data).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    else:
        yield from _bits(data.to_dense())


def _tokens(value: Any, depth: int, most: int) -> Iterator[_Token]:
    if isinstance(value, float | np.floating):
        yield float(value)
    elif value is None or isinstance(value, bool | int | str | bytes | bytearray | complex):
        yield f"{type(value).__name__} {value!r}".encode()
    elif isinstance(value, np.generic):
        yield from _tokens(value.item(), depth, most)
    elif isinstance(value, torch.dtype | torch.device | torch.Size):
        yield str(value).encode()
    elif isinstance(value, Tensor | np.ndarray) and prod(value.shape) > most:
        raise TooLargeError
    elif isinstance(value, Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"array {value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif depth == 0:
        yield type(value).__name__.encode()
    else:
        yield from _of_object(value, depth - 1, most)


def _of_tensor(tensor: Tensor) -> Iterator[_Token]:
    if tensor.is_floating_point() and tensor.numel() <= _FEW and tensor.layout is torch.strided:
        yield f"{tensor.dtype} {list(tensor.shape)}".encode()
        yield from tensor.detach().reshape(-1).tolist()
    else:
        yield from _bits(tensor)


def _of_object(value: Any, depth: int, most: int) -> Iterator[_Token]:
    name = type(value).__name__
    if isinstance(value, np.ndarray):
        yield from _tokens(value.tolist(), depth, most)
    elif isinstance(value, list | tuple) or name == "deque":
        yield f"{name} {len(value)}".encode()
        for item in value:
            yield from _tokens(item, depth, most)
    elif isinstance(value, Mapping):
        yield f"{name} {len(value)}".encode()
        for key in sorted(value, key=repr):
            yield from _tokens(key, depth, most)
            yield from _tokens(value[key], depth, most)
    elif isinstance(value, Set):
        yield f"{name} {sorted(content_of(item).digest for item in value)}".encode()
    elif isinstance(value, torch.Generator):
        yield from _of_tensor(value.get_state())
    elif isinstance(value, np.random.Generator):
        yield from _tokens(value.bit_generator.state, depth, most)
    elif isinstance(value, np.random.RandomState):
        yield from _tokens(value.get_state(legacy=False), depth, most)
    elif isinstance(value, random.Random):
        yield from _tokens(value.getstate(), depth, most)
    elif callable(getattr(value, "state_dict", None)):
        yield name.encode()
        yield from _tokens(value.state_dict(), depth, most)
    elif callable(getattr(value, "tobytes", None)):  # an image of PIL
        yield name.encode() + value.tobytes()
    elif isinstance(value, type) or callable(value):
        yield getattr(value, "__qualname__", name).encode()
    else:
        yield name.encode()
        yield from _tokens(getattr(value, "__dict__", None), depth, most)
