"""Datasets of large files with many samples each: JSON lines and tar shards.

A sample is located by its number through the index of its file (index.py), and read on access. Any
process may read, including forked ones (remote.py).
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch.utils.data import Dataset

from hvdtrain.data.compressed import (
    also_compressed,
    is_compressed,
    open_decompressed,
    readable_anywhere,
)
from hvdtrain.data.file_kinds import TAR_ARCHIVE, described
from hvdtrain.data.files import Fingerprint, find_files, of_files
from hvdtrain.data.index import Format, open_indexes
from hvdtrain.data.order import Indices
from hvdtrain.data.remote import ByteRanges, DataFile, open_file
from hvdtrain.errors import UserError
from hvdtrain.untrusted import parse_json, parse_yaml, read_regular

_NEWLINE = ord("\n")
_CHUNK_BYTES = 1 << 24
_MOST_SHARDS = 1 << 20


class Files:
    """Several indexed files that form one sequence of samples; also compressed ones.

    Args:
        patterns: files, directories, globs or URLs.
        cache: directory for indexes and for decompressed copies; None = next to the files. Remote
            files need it, unless there are indexes next to them.
        key: what the patterns come from, for messages.

    Attributes:
        paths: the files, also compressed ones.
        readable: the files, or decompressed copies of them.
        ranges: reads these.

    Raises:
        UserError: there is no file, or one is broken.
    """

    def __init__(
        self, patterns: Sequence[str], kind: Format, cache: str | None = None, key: str = "files"
    ) -> None:
        self.paths = find_files(key, patterns, kind.suffixes, kind.name)
        self.readable = readable_anywhere(self.paths, cache)
        self.indexes = open_indexes(self.readable, kind, cache)
        self.ranges = ByteRanges()

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
        # A list: bisect is several times as fast as numpy for one number.
        self._starts: list[int] = np.cumsum([0, *self.shard_samples]).tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    def fingerprint(self) -> Fingerprint:
        """16 hex digits that change with the files' names, numbers of samples, or content."""
        return self._files.fingerprint(self.shard_samples.tolist())

    def _read(self, number: int) -> tuple[DataFile, int, bytes]:
        """(file, offset, bytes) of a sample.

        Raises:
            IndexError: there is no such sample; this ends an iteration.
            UserError: the file cannot be read.
        """
        if not 0 <= number < len(self):
            raise IndexError(number)
        file = bisect_right(self._starts, number) - 1
        path, index = self._files.paths[file], self._files.indexes[file]
        start, stop = index[number - self._starts[file] :][:2].tolist()
        return path, start, self._files.ranges.read(self._files.readable[file], start, stop)


class JsonLines(_Records):
    """A sample is the object on a line; empty lines are skipped.

    Args:
        patterns: files (*.jsonl, *.ndjson, also compressed), directories, globs or URLs.
        cache: directory for indexes, see Files.
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
        return f"{path}: line {line_number(path, start)}"


class TarShards(_Records):
    """Samples in tar files, in WebDataset's format: consecutive members with the same name.

    A sample is {"__key__": "train/0001", "jpg": bytes, "cls": bytes} for train/0001.jpg and
    train/0001.cls. "__shard__" is the path of the file.

    Args:
        patterns: files (*.tar, also compressed), directories, globs or URLs.
        cache: directory for indexes, see Files.
        key: what the patterns come from, for messages.
    """

    def __init__(
        self, patterns: Sequence[str], cache: str | None = None, key: str = "TarShards"
    ) -> None:
        files = Files(patterns, TAR, cache, key)
        _check_splits(key, [path for path in files.paths if isinstance(path, Path)])
        super().__init__(files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, _, content = self._read(index)
        sample: dict[str, Any] = {"__shard__": str(path)}
        try:
            for name, member in _plain_members(content) or _members(content):
                found = _key_and_suffix(name)
                if found is not None:
                    sample["__key__"], suffix = found
                    sample[suffix] = member
        except tarfile.TarError as error:
            raise _broken_shard(path, error) from None
        return sample


# Of a directory that megatron-energon has prepared: which shards belong to which split.
_SPLITS = ".nv-meta/split.yaml"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def _check_splits(key: str, paths: Sequence[Path]) -> None:
    """Refuse the shards of several splits of one directory, which are all in one place.

    Raises:
        UserError: as above, or a shard was excluded, in part or as a whole.
    """
    for directory in sorted({above for path in paths for above in [*path.parents][:3]}):
        try:
            content = parse_yaml(read_regular(directory / _SPLITS))
            parts = {
                str(split): {name for listed in names or () for name in _in_range(listed)}
                for split, names in content["split_parts"].items()
            }
            excluded = [
                name for listed in content.get("exclude") or () for name in _in_range(listed)
            ]
        except OSError:
            continue
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{directory / _SPLITS} is not megatron-energon's: {error}") from None
        own = {
            path.relative_to(directory).as_posix() for path in paths if directory in path.parents
        }
        used = [split for split, names in parts.items() if names & own]
        if len(used) > 1:
            raise UserError(
                f"{key}: {directory} has the splits {' and '.join(used)} ({_SPLITS}): name the "
                f"shards of one, such as {min(parts[used[0]] & own)}"
            )
        left_out = [name for name in excluded if name in own or name.rpartition("/")[0] in own]
        if left_out:
            raise UserError(
                f"{key}: {directory / _SPLITS} excludes {left_out[0]}: name other shards, or write "
                "this one again without it"
            )


def _in_range(name: str) -> list[str]:
    """The names that a pattern such as shard_{00..09}.tar stands for."""
    found = _RANGE.search(name)
    if found is None:
        return [name]
    first, last = found.groups()
    numbers = range(int(first), min(int(last), int(first) + _MOST_SHARDS) + 1)
    begin, end = name[: found.start()], name[found.end() :]
    return [more for n in numbers for more in _in_range(f"{begin}{n:0{len(first)}}{end}")]


def _members(content: bytes) -> list[tuple[str, bytes]]:
    """Names and contents of the files in a part of a tar file."""
    found = []
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as members:
        for member in members:
            opened = members.extractfile(member) if member.isfile() else None
            if opened is not None:
                found.append((member.name, opened.read()))
    return found


def _plain_members(content: bytes) -> list[tuple[str, bytes]] | None:
    """Same as `_members`, several times as fast; None unless all members are files with one header.

    The fields of a header are those of POSIX.1-1988 (ustar).
    """
    found, at = [], 0
    while at < len(content):
        header = content[at : at + tarfile.BLOCKSIZE]
        at += tarfile.BLOCKSIZE
        try:
            size, checksum = int(header[124:135], 8), int(header[148:154], 8)
        except ValueError:
            return None
        if (
            header[135:136] not in (tarfile.NUL, b" ")
            or header[156:157] not in (tarfile.REGTYPE, tarfile.AREGTYPE)
            or header[345:346] != tarfile.NUL  # a part of the name
            or sum(header) - sum(header[148:156]) + 8 * ord(" ") != checksum
            or at + size > len(content)
        ):
            return None
        name = header[:100].partition(tarfile.NUL)[0].decode(errors="surrogateescape")
        found.append((name, content[at : at + size]))
        at += -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return found


def parse_line(line: bytes, path: DataFile, start: int) -> dict[str, Any]:
    """The object on a line.

    Args:
        path, start: location of the line; `start` in bytes.

    Raises:
        UserError: it is not a JSON object.
    """
    try:
        found = parse_json(line)
        reason = f"it is a {type(found).__name__}"
    except ValueError as error:
        found, reason = None, str(error)
    if isinstance(found, dict):
        return found
    if not is_compressed(path) and (content := described(path)):
        raise UserError(f"{path} is {content}")
    number = line_number(path, start)
    raise UserError(f"{path}: line {number} is not a JSON object ({reason}): repair or remove it")


def unicode_problem(value: Any) -> str:
    """Why text in a JSON value cannot be encoded as UTF-8; empty: it can.

    JSON can escape half of a surrogate pair, which remains of a character if text is cut.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start]).strip("'")
        return f"has half of a character, {half}, which UTF-8 cannot store: repair or remove it"
    except RecursionError:
        return "is nested too deeply"
    return ""


def line_number(path: DataFile, start: int) -> int:
    """Number of the line, from 1, that contains the byte `start` of a file's content."""
    with open_decompressed(path) as opened:
        return 1 + sum(part.count(b"\n") for part in _parts(opened, start))


def _parts(opened: BinaryIO, size: int) -> Iterator[bytes]:
    for at in range(0, size, _CHUNK_BYTES):
        yield opened.read(min(_CHUNK_BYTES, size - at))


def scan_lines(path: DataFile, start: int, stop: int) -> Indices:
    """Offsets of the non-empty lines that begin at the bytes start to stop - 1."""
    found = [np.empty(0, dtype=np.int64)]
    try:
        with open_file(path) as opened:
            # A line begins after a newline; two bytes of it show whether it is empty.
            before = b"\n" if start == 0 else b""
            opened.seek(max(start - 1, 0))
            for at in range(start, stop, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, stop - at)
                content = before + opened.read(size + 3 - len(before))
                found.append(_lines_of(content, size) + at)
                before = content[size : size + 3]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return np.concatenate(found)


def _lines_of(content: bytes, size: int) -> Indices:
    """Offsets of the non-empty lines that begin in content[1 : size + 1], from there.

    Args:
        content: up to 2 bytes longer than that; ends earlier only at the end of the file.
    """
    codes = np.frombuffer(content + b"\n\n", dtype=np.uint8)
    lines = np.flatnonzero(codes[: min(size, len(content) - 1)] == _NEWLINE)
    first, second = codes[lines + 1], codes[lines + 2]
    empty = (first == _NEWLINE) | ((first == ord("\r")) & (second == _NEWLINE))
    return lines[~empty]


def scan_tar(path: DataFile, start: int, stop: int) -> Indices:
    """Offsets of the first members of samples, and of the end of the last one."""
    starts, before = [], None
    try:
        with open_file(path) as opened, tarfile.open(fileobj=opened, mode="r:") as members:
            while (member := members.next()) is not None:
                name = _key_and_suffix(member.name) if member.isfile() else None
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


def _check_end(path: DataFile, end: int) -> None:
    """Check the end: tarfile accepts a file that is truncated between members or in a header."""
    with open_file(path) as opened:
        opened.seek(end)
        if opened.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("its end is missing")


def _key_and_suffix(name: str) -> tuple[str, str] | None:
    """Split the name of a file at the first dot of its base name; None: it is not of a sample."""
    directory, _, last = name.rpartition("/")
    key, dot, suffix = last.partition(".")
    return (f"{directory}/{key}".lstrip("/"), suffix.lower()) if key and dot else None


def _broken_shard(path: DataFile, error: Exception) -> UserError:
    if content := described(path, TAR_ARCHIVE):
        return UserError(f"{path} is {content}")
    return UserError(
        f"{path} is not a complete tar file ({error or type(error).__name__}): copy it again"
    )


JSON_LINES = Format(
    "file of JSON lines", also_compressed((".jsonl", ".ndjson")), scan_lines, splits=True
)
TAR = Format("tar shard", also_compressed((".tar",)), scan_tar)
