"""Samples of MDS directories, as MosaicML's `streaming` writes them (version 2 of the format).

A sample is: uint32 length of each column whose values differ in length; the values, one after the
other. Image columns require the extra `image`, shards compressed with Zstandard `zstd`.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from hvdtrain.data.chunks import (
    INDEX,
    OFFSETS,
    Content,
    Opened,
    broken_index,
    check_size,
    check_table,
    chunk_path,
    decompress_file,
    map_file,
    read_index,
)
from hvdtrain.data.files import Fingerprint, of_files
from hvdtrain.data.mds_encodings import Decode, decoder
from hvdtrain.errors import UserError
from hvdtrain.untrusted import is_of, shown

# Value of `compression`, and the suffix of such files elsewhere.
_SUFFIXES = {"zstd": ".zst", "gz": ".gz", "bz2": ".bz2"}


class _Columns(NamedTuple):
    """How the samples of a shard are stored.

    Args:
        lengths: of the columns whose values differ in length.
        columns: name, length if all values have the same one, function; None: not read.
    """

    lengths: struct.Struct
    columns: list[tuple[str, int | None, Decode | None]]


class _Shard(NamedTuple):
    """A shard of the index.

    Args:
        path: of the file that is read.
        suffix: of such compressed files; "" if it is not compressed.
        size: in bytes, not compressed.
    """

    path: Path
    suffix: str
    size: int
    samples: int
    columns: _Columns


class MdsSamples(Dataset[dict[str, Any]]):
    """A sample is {column: value}, with the values that `StreamingDataset` returns.

    A compressed shard whose decompressed file does not lie next to it is decompressed into memory.
    Each process keeps the most recently used ones, up to 256 MB. If the order jumps between more
    shards than that, each sample costs the decompression of a shard.

    Args:
        directory: with an index.json; its shards may be in directories below, as of `merge_index`.
        columns: which to read; None = all.
        key: what the directory comes from, for messages.

    Attributes:
        shard_samples: number of samples of each shard, int64, in the order of the samples.

    Raises:
        UserError: the index or a shard is broken, in another format, or lacks a column.
    """

    def __init__(
        self, directory: str, columns: Sequence[str] | None = None, key: str = "MdsSamples"
    ) -> None:
        self._directory, self._key = str(directory), key
        self._columns = None if columns is None else list(columns)
        self._opened = Opened()
        self._open()

    def _open(self) -> None:
        path, index = read_index(self._key, self._directory)
        if index.get("version") != 2 or not is_of(index.get("shards"), list[dict[str, Any]]):
            raise UserError(f"{path / INDEX} is not an index of MDS (version 2)")
        columns: dict[str, _Columns] = {}
        self._shards = [self._shard(path, shard, columns) for shard in index["shards"]]
        self._shards = [shard for shard in self._shards if shard.samples]
        if not self._shards:
            raise UserError(f"{path / INDEX} has no samples")
        self.shard_samples = np.array([shard.samples for shard in self._shards], dtype=np.int64)
        self._starts: list[int] = np.cumsum([0, *self.shard_samples]).tolist()

    def __getstate__(self) -> dict[str, Any]:
        # Functions of columns cannot be pickled.
        return {**self.__dict__, "_shards": [], "_starts": [0]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._starts[-1]:
            raise IndexError(index)
        number = bisect_right(self._starts, index) - 1
        shard = self._shards[number]
        content = self._opened.get(number)
        if content is None:
            content = self._content(number)
        begin, end = OFFSETS.unpack_from(content, 4 * (index - self._starts[number]) + 4)
        sample = {}
        try:
            lengths = iter(shard.columns.lengths.unpack_from(content, begin))
            begin += shard.columns.lengths.size
            for name, length, decode in shard.columns.columns:
                stop = begin + (next(lengths) if length is None else length)
                if decode is not None:
                    sample[name] = decode(content, begin, stop)
                begin = stop
            if begin != end:
                raise ValueError(f"its columns end {begin - end} bytes after it")
        except Exception as error:  # each encoding, and each format of images, has its own
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{self.where(index)} is damaged ({reason}): copy it again") from None
        return sample

    def where(self, index: int) -> str:
        """Location such as "shard.00000.mds: sample 7", for messages."""
        shard = bisect_right(self._starts, index) - 1
        return f"{self._shards[shard].path}: sample {index - self._starts[shard] + 1}"

    def fingerprint(self) -> Fingerprint:
        """16 hex digits that change with the shards' names, numbers of samples, or content."""
        index = Path(self._directory.removeprefix("file://")).expanduser() / INDEX
        paths = [index, *(shard.path for shard in self._shards)]
        return of_files(paths, [0, *self.shard_samples.tolist()])

    def _content(self, number: int) -> Content:
        shard = self._shards[number]
        content: Content
        if shard.suffix:
            content = decompress_file(shard.path, shard.suffix, shard.size)
        else:
            content = map_file(shard.path)
        check_table(shard.path, content, shard.samples)
        self._opened.add(number, content, shard.size if shard.suffix else 0)
        return content

    def _shard(self, path: Path, about: dict[str, Any], columns: dict[str, _Columns]) -> _Shard:
        if about.get("format") != "mds" or about.get("version") != 2:
            raise UserError(
                f"{path / INDEX}: a shard has the format {shown(about.get('format'))}, version "
                f"{shown(about.get('version'))}: only mds, version 2, is read"
            )
        raw: Any = about.get("raw_data")
        packed: Any = about.get("zip_data")
        samples: Any = about.get("samples")
        if not (_is_file(raw) and (packed is None or _is_file(packed)) and _is_count(samples)):
            raise broken_index(path, f"a shard is {shown(about)}")
        names = [about.get(f"column_{what}") for what in ("names", "encodings", "sizes")]
        known = repr(names)
        if known not in columns:
            columns[known] = self._checked(path, *names)
        file, suffix, size = chunk_path(path, raw["basename"]), "", raw["bytes"]
        if packed and not file.exists():
            file, size = chunk_path(path, packed["basename"]), packed["bytes"]
            algorithm = str(about.get("compression")).partition(":")[0]
            if algorithm not in _SUFFIXES:
                raise UserError(
                    f"{file} is compressed with {shown(algorithm)}, which is not read, only "
                    f"{', '.join(_SUFFIXES)}: decompress it to {raw['basename']}"
                )
            suffix = _SUFFIXES[algorithm]
        check_size(file, size)
        return _Shard(file, suffix, raw["bytes"], samples, columns[known])

    def _checked(self, path: Path, names: Any, encodings: Any, sizes: Any) -> _Columns:
        fits = is_of(names, list[str]) and is_of(encodings, list[str])
        if not (fits and is_of(sizes, list[int | None]) and len(set(names)) == len(names)):
            raise broken_index(path, f"the columns of a shard are {shown(names)}")
        if not len(names) == len(encodings) == len(sizes):
            raise broken_index(path, "a shard has columns without an encoding or a size")
        if missing := [name for name in self._columns or () if name not in names]:
            raise UserError(f"{path} has no column {missing[0]!r}, but {', '.join(names)}")
        found: list[tuple[str, int | None, Decode | None]] = []
        for name, encoding, size in zip(names, encodings, sizes, strict=True):
            decode = None
            if self._columns is None or name in self._columns:
                decode, length = decoder(f"{path}: column {name!r}", encoding)
                if (length or 0) != (size or 0):
                    raise broken_index(path, f"column {name!r} ({encoding}) has the size {size}")
            found.append((name, size or None, decode))
        variable = sum(length is None for _, length, _ in found)
        return _Columns(struct.Struct(f"<{variable}I"), found)


def _is_file(value: Any) -> bool:
    return isinstance(value, dict) and _is_count(value.get("bytes")) and "basename" in value


def _is_count(value: Any) -> bool:
    return is_of(value, int) and not isinstance(value, bool) and value >= 0
