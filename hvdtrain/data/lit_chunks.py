"""Chunks of litdata: samples as they are, compressed alone or in frames, or rows of Arrow."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hvdtrain.data.chunks import (
    INDEX,
    OFFSETS,
    Content,
    check_table,
    decompress_file,
    map_file,
)
from hvdtrain.data.compressed import decompressed
from hvdtrain.errors import UserError

_ZSTD, _ZST = b"\x28\xb5\x2f\xfd", ".zst"
_FRAMED, _ARROW = b"LDFZ01\0\0", b"LDARW01\0"
# Magic bytes, version, flags, samples, samples of a frame, frames.
_HEAD = struct.Struct("<8sHHIII")
# First sample, samples, position, compressed and decompressed length.
_FRAME = struct.Struct("<IIQII")
# Length of Arrow's file, magic bytes.
_FOOTER = struct.Struct("<I8s")
_BATCH_ROWS = 256

# Content, begin and end of a sample.
Place: TypeAlias = tuple[Content, int, int]
Grow: TypeAlias = Callable[[int], None]


class PlainChunk:
    """Samples behind their offsets.

    Args:
        each: whether each sample is compressed.
    """

    def __init__(self, path: Path, content: Content, samples: int, each: bool = False) -> None:
        check_table(path, content, samples)
        self.content = content
        self._path, self._each = path, each

    def place(self, number: int) -> Place:
        begin, end = OFFSETS.unpack_from(self.content, 4 * number + 4)
        # litdata 0.2.76 does not compress some samples, although its index says so.
        if self._each and self.content[begin : begin + 4] == _ZSTD:
            found = decompressed(self._path, self.content[begin:end], _ZST)
            return found, 0, len(found)
        return self.content, begin, end


class FramedChunk:
    """Samples in compressed frames, which stay decompressed.

    Args:
        grow: is called with the bytes of each decompressed frame.
    """

    def __init__(self, path: Path, content: Content, samples: int, grow: Grow) -> None:
        self._path, self._content, self._grow = path, content, grow
        self._found: dict[int, bytes] = {}
        broken = UserError(f"{path} is truncated or damaged: its frames do not fit; copy it again")
        try:
            _, version, _, count, self._rows, frames = _HEAD.unpack_from(content)
            self._offsets = np.frombuffer(content, "<u4", samples + 1, _HEAD.size).tolist()
            table = range(_HEAD.size + 4 * (samples + 1), len(content), _FRAME.size)[:frames]
            self._frames = [_FRAME.unpack_from(content, at) for at in table]
        except (struct.error, ValueError):
            raise broken from None
        if version != 1:
            raise UserError(f"{path} has frames of version {version}: only version 1 is read")
        fits = count == samples and len(self._frames) == frames and self._rows * frames >= samples
        for number, (first, _, position, length, _) in enumerate(self._frames):
            fits &= first == number * self._rows and position + length <= len(content)
        if not fits or any(begin > end for begin, end in pairwise(self._offsets)):
            raise broken

    def place(self, number: int) -> Place:
        frame = number // self._rows
        first, _, position, length, size = self._frames[frame]
        if (content := self._found.get(frame)) is None:
            content = decompressed(self._path, self._content[position : position + length], _ZST)
            if len(content) != size:
                raise ValueError(f"its frame has {len(content)} bytes, not {size}")
            self._found[frame] = content
            self._grow(size)
        before = self._offsets[first]
        return content, self._offsets[number] - before, self._offsets[number + 1] - before


class ArrowChunk:
    """Rows of an Arrow file at the end of a chunk; batches that were read are kept.

    Args:
        grow: is called with the bytes of memory of each batch; those of a file that is not
            compressed are mapped.
    """

    def __init__(self, path: Path, content: Content, samples: int, grow: Grow) -> None:
        try:
            import pyarrow as pa
        except ImportError:
            raise UserError(f"{path} needs pyarrow: pip install 'hvdtrain[parquet]'") from None
        self._grow, self._allocated = grow, pa.total_allocated_bytes
        self._found: dict[int, list[tuple[str, pa.Array]]] = {}
        end = len(content) - _FOOTER.size
        length, _ = _FOOTER.unpack_from(content, end)
        try:
            self._file = pa.ipc.open_file(pa.py_buffer(content)[max(end - length, 0) : end])
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split()).partition(". ")[0]
            raise UserError(f"{path} has no complete rows ({reason}): copy it again") from None
        if self._file.num_record_batches != -(-samples // _BATCH_ROWS):
            raise UserError(f"{path} does not have {samples} rows, as in {INDEX}: copy it again")

    def row(self, number: int) -> dict[str, Any]:
        batch, row = divmod(number, _BATCH_ROWS)
        if (columns := self._found.get(batch)) is None:
            before = self._allocated()
            rows = self._file.get_batch(batch)
            # Without this check, a damaged batch may end the process.
            rows.validate(full=True)
            columns = [*zip(rows.schema.names, rows.columns, strict=True)]
            self._found[batch] = columns
            self._grow(self._allocated() - before)
        return {name: values[row].as_py() for name, values in columns}


Chunk: TypeAlias = PlainChunk | FramedChunk | ArrowChunk


def open_chunk(path: Path, samples: int, size: int, each: bool, grow: Grow) -> tuple[Chunk, int]:
    """Open a chunk, and return the bytes of memory that it occupies, too.

    Args:
        size: of its content in bytes, not compressed.
        each: whether each sample is compressed.
        grow: is called with the bytes that it occupies later.

    Raises:
        UserError: it cannot be read.
    """
    content, memory = map_file(path), 0
    if content[:4] == _ZSTD:
        content, memory = decompress_file(path, _ZST, size), size
    if content[: len(_FRAMED)] == _FRAMED:
        return FramedChunk(path, content, samples, grow), memory
    if content[-len(_ARROW) :] == _ARROW:
        return ArrowChunk(path, content, samples, grow), memory
    return PlainChunk(path, content, samples, each), memory
