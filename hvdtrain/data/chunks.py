"""Chunk files of MDS and litdata: samples behind a table of their offsets, listed in an index.json.

A chunk is: uint32 number of samples; uint32 offsets of the samples and of the end; the samples.
Chunks are memory-mapped, or decompressed into memory.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Hashable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.compressed import decompressed
from hvdtrain.data.remote import is_url
from hvdtrain.errors import UserError
from hvdtrain.untrusted import read_json, shown

Content: TypeAlias = mmap.mmap | bytes

INDEX = "index.json"
# Of the decompressed content that a process keeps.
_CACHE_BYTES = 1 << 28
_OPEN_FILES = 128
# Number of samples before the offsets, and the two offsets of a sample.
_COUNT, OFFSETS = struct.Struct("<I"), struct.Struct("<II")


def read_index(key: str, directory: str) -> tuple[Path, dict[str, Any]]:
    """Return a directory, and the content of its index.json.

    Raises:
        UserError: the directory is a URL, or has no index.json, or a broken one.
    """
    directory = directory.removeprefix("file://")
    if is_url(directory):
        raise UserError(f"{key}: {directory}: chunks are read from local files: copy them")
    path = Path(directory).expanduser()
    try:
        return path, read_json(path / INDEX)
    except FileNotFoundError:
        splits = sorted(below.parent.name for below in path.glob(f"*/{INDEX}"))
        hint = f": name one of {', '.join(splits)}" if splits else ""
        raise UserError(f"{key}: {path} has no {INDEX}{hint} (from {os.getcwd()})") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path / INDEX} cannot be read ({error}): copy it again") from None


def broken_index(path: Path, what: str) -> UserError:
    return UserError(f"{path / INDEX}: {what}: copy it again")


def chunk_path(directory: Path, name: Any) -> Path:
    """Return the path of a file that an index names.

    Raises:
        UserError: it is not in the directory.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise broken_index(directory, f"the name of a file is {shown(name)}")
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise UserError(f"{directory / INDEX}: {shown(name)} leaves the directory: write it again")
    return directory / name


def check_size(path: Path, size: int) -> None:
    """Raise UserError if a file does not have this size."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} of {INDEX}: {error.strerror}: copy it again") from None
    if found != size:
        raise UserError(f"{path} has {found} bytes, but {size} in {INDEX}: copy it again")


def map_file(path: Path) -> Content:
    """Map a file; raise UserError if it cannot be read."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def decompress_file(path: Path, suffix: str, size: int) -> bytes:
    """Return the content of a compressed file; raise UserError if it does not have this size."""
    content = decompressed(path, map_file(path), suffix)
    if len(content) != size:
        raise UserError(
            f"{path} has {len(content)} bytes when decompressed, but {size} in {INDEX}: copy it "
            "again"
        )
    return content


def check_table(path: Path, content: Content, samples: int) -> None:
    """Raise UserError if a chunk does not have a table of this many samples within the chunk."""
    if len(content) < _COUNT.size or (found := _COUNT.unpack_from(content)[0]) != samples:
        has = f"{found} samples" if len(content) >= _COUNT.size else "no samples"
        raise UserError(f"{path} has {has}, but {samples} in {INDEX}: copy the directory again")
    head = _COUNT.size * (samples + 2)
    if len(content) >= head:
        offsets = np.frombuffer(content, "<u4", samples + 1, _COUNT.size).astype(np.int64)
        if offsets[0] >= head and (np.diff(offsets) >= 0).all() and offsets[-1] <= len(content):
            return
    raise UserError(f"{path} is truncated or damaged: its offsets exceed it; copy it again")


class Opened:
    """Mapped files and decompressed content of one process, the most recently used ones."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Opened, ()

    def get(self, key: Hashable) -> Any:
        """Return what was added under a key; None: nothing, or it was dropped."""
        if (found := self._found.get(key)) is None:
            return None
        self._found.move_to_end(key)
        return found[0]

    def add(self, key: Hashable, value: Any, size: int = 0) -> Any:
        """Keep and return a value that occupies `size` bytes of memory."""
        self._bytes += size
        while self._found and (len(self._found) >= _OPEN_FILES or self._bytes > _CACHE_BYTES):
            self._bytes -= self._found.popitem(last=False)[1][1]
        self._found[key] = value, size
        return value

    def grow(self, key: Hashable, size: int) -> None:
        """Count `size` more bytes for a value."""
        if key in self._found:
            value, before = self._found.pop(key)
            self._bytes -= before
            self.add(key, value, before + size)


# --- values in a chunk, from one position to another --------------------------


def array_at(content: Content, begin: int, end: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a copy of an array, which does not keep the file open and can be written to."""
    count, rest = divmod(end - begin, dtype.itemsize)
    if rest:
        raise ValueError(f"{end - begin} bytes are not {dtype}")
    return np.frombuffer(content, dtype, count, begin).copy()


def bytes_at(content: Content, begin: int, end: int) -> bytes:
    return content[begin:end]


def text_at(content: Content, begin: int, end: int) -> str:
    return str(content[begin:end], "utf-8")


def pixels_at(content: Content, begin: int, end: int) -> Any:
    """Return an image of Pillow that is stored as uint32 width, height, length of mode; pixels."""
    from PIL import Image

    width, height, length = struct.unpack_from("<III", content, begin)
    begin += 12
    mode = text_at(content, begin, begin + length)
    return Image.frombytes(mode, (width, height), content[begin + length : end])


def image_at(content: Content, begin: int, end: int) -> Any:
    """Return an image of Pillow that is stored as a file, such as JPEG or PNG."""
    from PIL import Image

    return Image.open(io.BytesIO(content[begin:end]))


def lengths_at(content: Content, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the positions of values that are stored as uint32 count; uint32 lengths; values."""
    (count,) = _COUNT.unpack_from(content, begin)
    lengths = array_at(content, begin + 4, begin + 4 + 4 * count, np.dtype("<u4")).tolist()
    ends = np.cumsum([begin + 4 + 4 * count, *lengths], dtype=np.int64).tolist()
    if ends[-1] > end:
        raise ValueError("a list exceeds its sample")
    return [*pairwise(ends)]


def require_pillow(where: str) -> None:
    """Raise UserError if Pillow is missing."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise UserError(
            f"{where}: reading images requires Pillow: pip install 'hvdtrain[image]'"
        ) from None
