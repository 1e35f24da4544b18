"""Leaves of samples of litdata: functions that read a value of a chunk."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
DecodeLeaf = Callable[[Content, int, int], Any]

# Numbers that stand for dtypes are places in these lists.
_NUMPY = [
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128", "bool",
]  # fmt: skip
_TORCH = [
    "float32", "float32", "float64", "float64", "complex64", "complex64", "complex128",
    "complex128", "float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32",
    "int32", "int64", "int64", "bool", "uint16",
]  # fmt: skip
_INT, _FLOAT, _LENGTH = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<I")


def leaf_decoder(where: str, name: str) -> DecodeLeaf:
    """Return the function that reads leaves of a format, such as int or no_header_tensor:16.

    Raises:
        UserError: the format is code, or not known.
    """
    kind, _, detail = name.partition(":")
    if "pickle" in (kind, detail) or kind == "graph":
        raise UserError(f"{where} is a pickle, which is code: write arrays, strings or numbers")
    if kind in _IMAGES:
        require_pillow(where)
        return _IMAGES[kind]
    if kind in _WITHOUT_HEADER and detail.isdecimal():
        with suppress(IndexError):
            return _WITHOUT_HEADER[kind](int(detail))
    if kind not in _LEAVES:
        raise UserError(f"{where} has the format {shown(name)}, which is not read")
    return _LEAVES[kind]


def _int(content: Content, begin: int, end: int) -> int:
    value: int = _INT.unpack_from(content, begin)[0]
    return value


def _float(content: Content, begin: int, end: int) -> float:
    value: float = _FLOAT.unpack_from(content, begin)[0]
    return value


def _bool(content: Content, begin: int, end: int) -> bool:
    return content[begin] != 0


def _flat(content: Content, begin: int, end: int, dtype: np.dtype[Any]) -> Tensor:
    return torch.from_numpy(array_at(content, begin, end, dtype))


def _flat_bfloat16(content: Content, begin: int, end: int) -> Tensor:
    return _flat(content, begin, end, np.dtype(np.int16)).view(torch.bfloat16)


def _of_numpy(number: int) -> DecodeLeaf:
    return partial(array_at, dtype=np.dtype(_NUMPY[number]))


def _of_torch(number: int) -> DecodeLeaf:
    name = _TORCH[number]
    return _flat_bfloat16 if name == "bfloat16" else partial(_flat, dtype=np.dtype(name))


def _array(content: Content, begin: int, end: int) -> NDArray[Any]:
    dtype, rank = struct.unpack_from("<II", content, begin)
    shape = struct.unpack_from(f"<{rank}I", content, begin + 8)
    return _of_numpy(dtype)(content, begin + 8 + 4 * rank, end).reshape(shape)


def _tensor(content: Content, begin: int, end: int) -> Tensor:
    dtype, rank = struct.unpack_from(">II", content, begin)
    shape = struct.unpack_from(f">{rank}I", content, begin + 8)
    return _of_torch(dtype)(content, begin + 8 + 4 * rank, end).reshape(shape)


def _rgb(content: Content, begin: int, end: int) -> Tensor:
    """Return an image file as uint8 tensor (3, height, width), upright if it is a JPEG."""
    from PIL import ImageOps

    image = image_at(content, begin, end)
    if image.format == "JPEG":
        image = ImageOps.exif_transpose(image)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def _rgbs(content: Content, begin: int, end: int) -> list[Tensor]:
    return [_rgb(content, *each) for each in lengths_at(content, begin, end)]


# --- nested lists and dicts -----------------------------------------------------


class _Nested:
    """Reader of values that begin with a byte for their type.

    Args:
        raw: the value and what follows it.
    """

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0
        self._kinds: dict[int, Callable[[], Any]] = {
            0: lambda: parse_json(self._bytes(self._length())),
            1: lambda: [self._text() for _ in range(self._length())],
            2: lambda: self._numbers("<i8"),
            3: lambda: self._numbers("<f8"),
            4: lambda: [byte != 0 for byte in self._bytes(self._length())],
            5: lambda: {self._text(): self.value() for _ in range(self._length())},
            6: self._records,
            7: self._text,
            8: lambda: _INT.unpack(self._bytes(8))[0],
            9: lambda: _FLOAT.unpack(self._bytes(8))[0],
            10: lambda: self._bytes(1) != b"\0",
            11: lambda: None,
        }

    def value(self) -> Any:
        return self._kinds[self._bytes(1)[0]]()

    def _bytes(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > len(self._raw):
            raise ValueError("a nested value exceeds its leaf")
        return self._raw[begin : self._at]

    def _length(self) -> int:
        return int(_LENGTH.unpack(self._bytes(4))[0])

    def _text(self) -> str:
        return str(self._bytes(self._length()), "utf-8")

    def _numbers(self, dtype: str) -> Any:
        return np.frombuffer(self._bytes(8 * self._length()), dtype).tolist()

    def _records(self) -> list[dict[str, Any]]:
        """Return dicts with the same keys; types have other numbers here."""
        count = self._length()
        keys = [self._text() for _ in range(self._length())]
        if not keys:
            raise ValueError("its dicts are empty")
        kinds = {0x10: 11, 0x11: 7, 0x12: 8, 0x13: 9, 0x14: 10}
        return [
            {key: self._kinds[kinds[self._bytes(1)[0]]]() for key in keys} for _ in range(count)
        ]


def _json(content: Content, begin: int, end: int) -> Any:
    raw = content[begin:end]
    return parse_json(raw) if raw[:1] > b"\x20" else _Nested(raw).value()


_LEAVES: dict[str, DecodeLeaf] = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "str": text_at,
    "text": text_at,
    "bytes": bytes_at,
    "numpy": _array,
    "tensor": _tensor,
    "json": _json,
}
_WITHOUT_HEADER = {"no_header_numpy": _of_numpy, "no_header_tensor": _of_torch}
_IMAGES: dict[str, DecodeLeaf] = {
    "pil": pixels_at,
    "jpeg": _rgb,
    "image": _rgb,
    "jpeg_array": _rgbs,
}
