"""Datasets of large files with many samples each: JSON lines and tar shards.

A sample is located by its number through the index of its file (index.py), and read on access. Any
process may read, including forked ones, because no file is kept open.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from hvdtrain.data.files import Fingerprint, expand, of_files
from hvdtrain.data.index import Format, open_indexes
from hvdtrain.data.order import Indices
from hvdtrain.errors import UserError

_NEWLINE = ord("\n")
_CHUNK_BYTES = 1 << 24


class Files:
    """Several indexed files that form one sequence of samples.

    Args:
        patterns: files, directories or globs.
        cache: directory for indexes; None = next to the files.
        key: what the patterns come from, for messages.

    Raises:
        UserError: there is no file, or one is broken.
    """

    def __init__(
        self, patterns: Sequence[str], kind: Format, cache: str | None = None, key: str = "files"
    ) -> None:
        self.paths = expand(key, patterns, kind.suffixes, kind.name)
        self.indexes = open_indexes(self.paths, kind, cache)

    def fingerprint(self, samples: Sequence[int]) -> Fingerprint:
        """Fingerprint of the names, samples per file and content: see `of_files`."""
        return of_files(self.paths, samples)


class _Records(Dataset[dict[str, Any]]):
    """Samples that are stored one after the other in files.

    Attributes:
        shard_samples: number of samples of each file, int64, in the order of the samples.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self.shard_samples = np.array([len(index) - 1 for index in files.indexes], dtype=np.int64)
        self._starts = np.cumsum([0, *self.shard_samples])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def fingerprint(self) -> Fingerprint:
        """16 hex digits that change with the files' names, numbers of samples, or content."""
        return self._files.fingerprint(self.shard_samples.tolist())

    def _read(self, number: int) -> tuple[Path, int, bytes]:
        """(file, offset, bytes) of a sample.

        Raises:
            IndexError: there is no such sample; this ends an iteration.
            UserError: the file cannot be read.
        """
        if not 0 <= number < len(self):
            raise IndexError(number)
        file = int(np.searchsorted(self._starts, number, side="right")) - 1
        path, index = self._files.paths[file], self._files.indexes[file]
        start, stop = index[number - self._starts[file] :][:2].tolist()
        try:
            with open(path, "rb", buffering=0) as opened:
                return path, start, os.pread(opened.fileno(), stop - start, start)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None


class JsonLines(_Records):
    """A sample is the object on a line; empty lines are skipped.

    Args:
        patterns: files (*.jsonl, *.ndjson), directories or globs.
        cache: directory for indexes; None = next to the files.
        key: what the patterns come from, for messages.

    Accessing a sample raises UserError if its line is not a JSON object.
    """

    def __init__(
        self, patterns: Sequence[str], cache: str | None = None, key: str = "JsonLines"
    ) -> None:
        super().__init__(Files(patterns, JSON_LINES, cache, key))

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, start, line = self._read(index)
        return parse_line(line, path, start)

    def where(self, index: int) -> str:
        """Location such as "chats.jsonl: line 7", for messages; counts the preceding lines."""
        path, start, _ = self._read(index)
        return f"{path}: line {_line_number(path, start)}"


class TarShards(_Records):
    """Samples in tar files, in WebDataset's format: consecutive members with the same name.

    A sample is {"__key__": "train/0001", "jpg": bytes, "cls": bytes} for train/0001.jpg and
    train/0001.cls. "__shard__" is the path of the file.

    Args:
        patterns: files (*.tar, not compressed), directories or globs.
        cache: directory for indexes; None = next to the files.
        key: what the patterns come from, for messages.
    """

    def __init__(
        self, patterns: Sequence[str], cache: str | None = None, key: str = "TarShards"
    ) -> None:
        super().__init__(Files(patterns, TAR, cache, key))

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, _, content = self._read(index)
        sample: dict[str, Any] = {"__shard__": str(path)}
        try:
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as members:
                for member in members:
                    name = _name(member)
                    opened = members.extractfile(member) if name else None
                    if name is not None and opened is not None:
                        sample["__key__"], suffix = name
                        sample[suffix] = opened.read()
        except tarfile.TarError as error:
            raise _broken_shard(path, error) from None
        return sample


def parse_line(line: bytes, path: Path, start: int) -> dict[str, Any]:
    """The object on a line.

    Args:
        path, start: location of the line; `start` in bytes.

    Raises:
        UserError: it is not a JSON object.
    """
    try:
        found = json.loads(line)
        reason = f"it is a {type(found).__name__}"
    except ValueError as error:
        found, reason = None, str(error)
    if isinstance(found, dict):
        return found
    number = _line_number(path, start)
    raise UserError(f"{path}: line {number} is not a JSON object ({reason}): repair or remove it")


def _line_number(path: Path, start: int) -> int:
    with open(path, "rb") as opened:
        return 1 + sum(part.count(b"\n") for part in _parts(opened, start))


def _parts(opened: io.BufferedReader, size: int) -> Iterator[bytes]:
    for at in range(0, size, _CHUNK_BYTES):
        yield opened.read(min(_CHUNK_BYTES, size - at))


def scan_lines(path: Path, start: int, stop: int) -> Indices:
    """Offsets of the non-empty lines that begin at the bytes start to stop - 1."""
    found = [np.zeros(int(start == 0), dtype=np.int64)]
    begin = max(start - 1, 0)  # a line begins after a newline
    try:
        size = path.stat().st_size
        with open(path, "rb") as opened:
            opened.seek(begin)
            for part in _parts(opened, stop - 1 - begin):
                newlines = np.flatnonzero(np.frombuffer(part, dtype=np.uint8) == _NEWLINE)
                found.append(newlines + begin + 1)
                begin += len(part)
        lines = np.concatenate(found)
        return lines[~_empty(path, lines, size)] if len(lines) else lines
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _empty(path: Path, lines: Indices, size: int) -> np.ndarray:
    """Mask of the lines without characters, given the lines' offsets."""
    content = np.memmap(path, dtype=np.uint8, mode="r")
    inside = lines < size
    first = content[np.minimum(lines, size - 1)]
    second = content[np.minimum(lines + 1, size - 1)]
    carriage = (first == ord("\r")) & ((second == _NEWLINE) | (lines + 1 >= size))
    return ~inside | (first == _NEWLINE) | carriage


def scan_tar(path: Path, start: int, stop: int) -> Indices:
    """Offsets of the first members of samples, and of the end of the last one."""
    starts, before = [], None
    try:
        with tarfile.open(path, mode="r:") as members:
            while (member := members.next()) is not None:
                name = _name(member)
                if name is not None and name[0] != before:
                    starts.append(member.offset)
                    before = name[0]
                members.members = []  # type: ignore[attr-defined]  # otherwise all stay in memory
            end = members.offset
        _check_end(path, end)
    except (tarfile.TarError, EOFError) as error:
        raise _broken_shard(path, error) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if not starts:
        raise UserError(f"{path}: the shard has no files")
    return np.array([*starts, end], dtype=np.int64)


def _check_end(path: Path, end: int) -> None:
    """Check the end: tarfile accepts a file that is truncated between members or in a header."""
    with open(path, "rb") as opened:
        opened.seek(end)
        if opened.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("its end is missing")


def _name(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """(key, suffix) of a file, split at the first dot of its base name."""
    directory, _, last = member.name.rpartition("/")
    key, dot, suffix = last.partition(".")
    if not (member.isfile() and key and dot):
        return None
    return f"{directory}/{key}".lstrip("/"), suffix.lower()


def _broken_shard(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} is not a complete tar file ({error or type(error).__name__}; compressed files "
        "cannot be read by sample): copy it again"
    )


JSON_LINES = Format("file of JSON lines", (".jsonl", ".ndjson"), scan_lines, splits=True)
TAR = Format("tar shard", (".tar",), scan_tar)
