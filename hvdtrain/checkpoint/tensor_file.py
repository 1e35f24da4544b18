"""Tensors in a safetensors file, written and read in one pass together with the checksum.

The format is https://github.com/huggingface/safetensors, and its library reads these files.
The library does not write them: it returns no checksum, so each file would be read again, and
it leaves dirty pages of the file's full size, which slow down all other writers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.tensor_shards import ShardPosition, flattened
from hvdtrain.untrusted import is_of, open_regular, parse_json, shown

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHUNK = 8 << 20  # bytes; hashing and writing one lets other threads run
_READ = 1 << 20  # bytes; reading this many counts as progress, even on a slow disk
_UNSYNCED = 64 << 20  # most bytes that wait in memory for the disk
_ALIGNMENT = 8
_METADATA = "__metadata__"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], positions: Mapping[str, ShardPosition] | None = None
) -> dict[str, Any]:
    """Write a file and wait until it is on disk.

    Args:
        positions: positions of those tensors that are shards of larger ones; stored as JSON in the
            file's metadata, by tensor name.

    Returns:
        {"bytes": int, "sha256": str} of the file.

    Raises:
        OSError: it could not be written.
    """
    # The largest elements first, so that all are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    digest, size, synced = hashlib.sha256(), 0, 0
    with open(path, "wb") as file:
        for chunk in _chunks(names, tensors, positions or {}):
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
            if size - synced >= _UNSYNCED:
                _sync(file, synced, size)
                synced = size
        _sync(file, synced, size)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _chunks(
    names: list[str], tensors: Mapping[str, Tensor], positions: Mapping[str, ShardPosition]
) -> Iterator[memoryview]:
    header: dict[str, Any] = {}
    if positions:
        header[_METADATA] = {
            n: json.dumps(position.described()) for n, position in positions.items()
        }
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        content = flattened(tensors[name].detach()).view(torch.uint8)
        data = content.cpu().numpy().data
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]


def _sync(file: BinaryIO, start: int, end: int) -> None:
    """Sync a range to disk and drop it from the page cache, which files read again need more."""
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def read_file(path: Path) -> tuple[Tensor, dict[str, Any]]:
    """Read a file into memory.

    Returns:
        the content, uint8, for `unpack`; and its {"bytes": int, "sha256": str}.

    Raises:
        OSError: it cannot be read.
        RankLostError: this rank's generation has ended.
    """
    digest, size = hashlib.sha256(), 0
    content = torch.empty(path.stat().st_size, dtype=torch.uint8)
    data = content.numpy().data
    with open_regular(path) as file, ThreadPoolExecutor(1) as hashing:
        # One chunk is hashed while the next is read.
        while read := file.readinto(data[size : size + _READ]):
            hashing.submit(digest.update, data[size : size + read])
            size += read
            heartbeat.HEARTBEAT.advance()
    return content, {"bytes": size, "sha256": digest.hexdigest()}


def unpack(content: Tensor) -> dict[str, Tensor]:
    """The tensors of a file, by name; they share the memory of `content`.

    Raises:
        ValueError: it is not a safetensors file.
    """
    begin, header = _header(content)
    header.pop(_METADATA, None)
    data, tensors = content[begin:], {}
    for name, entry in header.items():
        if not is_of(entry, dict[str, Any]):
            raise _not_safetensors(f"{shown(name)} is {shown(entry)}")
        dtype, shape = entry.get("dtype"), entry.get("shape")
        offsets = entry.get("data_offsets")
        known = is_of(dtype, str) and dtype in _DTYPES
        if not known or not is_of(shape, list[int]) or not is_of(offsets, list[int]):
            raise _not_safetensors(f"{shown(name)} is {shown(entry)}")
        start, end = offsets if len(offsets) == 2 else (0, -1)
        size = prod(shape) * _DTYPES[dtype].itemsize
        if min(shape, default=0) < 0 or not 0 <= start <= end <= len(data) or end - start != size:
            raise _not_safetensors(
                f"{shown(name)} of shape {shown(shape)} lies at {shown(offsets)}"
            )
        try:
            tensors[name] = data[start:end].view(_DTYPES[dtype]).view(shape)
        except (RuntimeError, TypeError) as error:  # not aligned, or a shape beyond 63 bits
            raise _not_safetensors(f"{shown(name)}: {error}") from None
    return tensors


def _not_safetensors(reason: str) -> ValueError:
    return ValueError(f"not a safetensors file: {reason}")


def map_file(path: Path) -> Tensor:
    """Map a file for `unpack`: like `read_file`, but only accessed pages are read.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    try:
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(errno.EIO, str(error), path.name) from None


def positions_of(content: Tensor) -> dict[str, ShardPosition]:
    """The positions of the tensors in a file that are shards of larger tensors, by name.

    Raises:
        ValueError: it is not a safetensors file.
    """
    described = _header(content)[1].get(_METADATA, {})
    if not is_of(described, dict[str, str]):
        raise _not_safetensors(f"{_METADATA} is {shown(described)}")
    # Files from other programs have other metadata.
    positions = {n: parse_json(text) for n, text in described.items() if text.startswith("{")}
    try:
        return {name: ShardPosition.of(found) for name, found in positions.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not the description of a shard: {error}") from None


def _header(content: Tensor) -> tuple[int, dict[str, Any]]:
    """Return the offset of the data, and the header."""
    begin = 8 + int.from_bytes(content[:8].numpy().tobytes(), "little")
    if not 8 < begin <= len(content):
        raise _not_safetensors("its header is longer than the file")
    header = parse_json(content[8:begin].numpy().tobytes())
    if not is_of(header, dict[str, Any]):
        raise _not_safetensors("its header is not a JSON object")
    return begin, header
