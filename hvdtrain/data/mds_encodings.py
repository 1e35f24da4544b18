"""Encodings of columns of MDS: functions that read a value of a shard."""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.chunks import (
    Content,
    array_at,
    bytes_at,
    image_at,
    lengths_at,
    pixels_at,
    require_pillow,
    text_at,
)
from hvdtrain.errors import UserError
from hvdtrain.untrusted import parse_json, shown

# Arguments: content, begin and end of the value.
Decode = Callable[[Content, int, int], Any]

_DTYPES = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
_DTYPES += ["float16", "float32", "float64"]
# Byte before an array whose dtype its encoding does not name.
_DTYPE_OF = dict(
    zip([8, 16, 32, 64, 9, 17, 33, 65, 18, 34, 66], map(np.dtype, _DTYPES), strict=True)
)


_DIMENSIONS = "BHIQ"
_INTEGER = struct.Struct("<q")


def _integer(content: Content, begin: int, end: int) -> int:
    value: int = _INTEGER.unpack_from(content, begin)[0]
    return value


def _scalar(content: Content, begin: int, end: int, dtype: np.dtype[Any]) -> Any:
    return np.frombuffer(content, dtype, 1, begin)[0]


def _fixed(
    content: Content, begin: int, end: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    return array_at(content, begin, end, dtype).reshape(shape)


def _array(content: Content, begin: int, end: int, dtype: np.dtype[Any] | None) -> NDArray[Any]:
    """Return an array that begins with its dtype, unless given, and its shape."""
    if dtype is None:
        dtype = _DTYPE_OF[content[begin]]
        begin += 1
    count, size = content[begin] >> 2, content[begin] & 3
    shape = struct.unpack_from(f"<{count}{_DIMENSIONS[size]}", content, begin + 1)
    return array_at(content, begin + 1 + (count << size), end, dtype).reshape(shape)


def _list(content: Content, begin: int, end: int, decode: Decode) -> list[Any]:
    return [decode(content, *each) for each in lengths_at(content, begin, end)]


def _list_of(decode: Decode) -> Decode:
    # 4 bytes precede a list.
    return lambda content, begin, end: _list(content, begin + 4, end, decode)


# Values that differ in length.
_PLAIN: dict[str, Decode] = {
    "bytes": bytes_at,
    "str": text_at,
    "str_int": lambda *place: int(text_at(*place)),
    "str_float": lambda *place: float(text_at(*place)),
    "str_decimal": lambda *place: Decimal(text_at(*place)),
    "json": lambda *place: parse_json(bytes_at(*place)),
}
_IMAGES: dict[str, Decode] = {
    "pil": pixels_at,
    "jpeg": image_at,
    "png": image_at,
    "jpeg_array": partial(_list, decode=image_at),
    "jpegarray": partial(_list, decode=image_at),
    "list[pil]": _list_of(pixels_at),
    "list[jpeg]": _list_of(image_at),
    "list[png]": _list_of(image_at),
}


def decoder(where: str, encoding: str) -> tuple[Decode, int | None]:
    """Return the function that reads values of an encoding, and their length if all have the same.

    Raises:
        UserError: the encoding is code, or not known.
    """
    kind, _, details = encoding.partition(":")
    if kind == "pkl":
        raise UserError(f"{where} has pickles, which are code: write it as json, or omit it")
    if kind == "ndarray":
        try:
            return _arrays(details)
        except (ValueError, TypeError):
            kind = ""
    if details or kind not in {*_PLAIN, *_IMAGES, *_DTYPES, "int"}:
        raise UserError(f"{where} has the encoding {shown(encoding)}, which is not read: omit it")
    if kind == "int":
        return _integer, 8
    if kind in _DTYPES:
        dtype = np.dtype(kind)
        return partial(_scalar, dtype=dtype), dtype.itemsize
    if kind in _IMAGES:
        require_pillow(where)
    return {**_PLAIN, **_IMAGES}[kind], None


def _arrays(details: str) -> tuple[Decode, int | None]:
    """Return what `decoder` does, for "" or a dtype or a dtype and a shape: int32:2,3."""
    name, _, dimensions = details.partition(":")
    if not name:
        return partial(_array, dtype=None), None
    if name not in _DTYPES:
        raise ValueError(name)
    dtype = np.dtype(name)
    if not dimensions:
        return partial(_array, dtype=dtype), None
    shape = tuple(map(int, dimensions.split(",")))
    return partial(_fixed, dtype=dtype, shape=shape), prod(shape) * dtype.itemsize
