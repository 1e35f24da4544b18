"""Indexes of the samples in large files, built once and stored next to the files.

The index of a file is a memory-mapped int64 array in the .npy format. It starts with a head of
three numbers: format version, size and modification time of the file. Ascending numbers follow: for
a file with n samples, n + 1 offsets in bytes; for Parquet, the number of rows before each row group
and the total.

The index of a remote file (remote.py) has the file's version instead of a modification time. It
lies in the cache directory. Only `hvdtrain data index` stores one next to a remote file; a run uses
it if it is there.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.data.files import assign_files, hidden_copy, remove_leftovers
from hvdtrain.data.order import Indices
from hvdtrain.data.remote import REQUESTS_AT_ONCE, DataFile, RemoteFile, read_url, write_url
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.runtime.mpi import RankGroup, on_all_ranks

_VERSION = 1
# Bytes that one rank scans at a time, if a scan can begin anywhere in a file.
_RANGE_BYTES = 1 << 26


@dataclass(frozen=True)
class Format:
    """A kind of file that holds many samples.

    Args:
        name: name of the kind, for messages.
        suffixes: suffixes of its files.
        scan: (path, start, stop) -> index numbers of the samples that begin at the bytes start to
            stop - 1; raises UserError if the file is broken.
        splits: a scan can begin anywhere, and the index ends with the file's size; else a scan
            reads the whole file.
    """

    name: str
    suffixes: tuple[str, ...]
    scan: Callable[[DataFile, int, int], Indices]
    splits: bool = False


@dataclass(frozen=True)
class _Plan:
    """Work of all ranks; made by rank 0.

    Args:
        files: files without an up-to-date index, and their heads
        ranges: (number in `files`, start, stop, rank that scans it)
        tag: distinguishes the temporary files of this run from another run's
    """

    files: list[tuple[DataFile, Indices]]
    ranges: list[tuple[int, int, int, int]]
    tag: str


def index_path(path: DataFile, cache: str | None) -> Path | None:
    """Hidden, next to the file; or in the directory `cache`, shared by all data directories.

    None: next to a remote file.
    """
    if cache is None:
        return None if isinstance(path, RemoteFile) else path.with_name(_index_name(path))
    digest = hashlib.sha256(os.fsencode(str(path.absolute()))).hexdigest()[:16]
    return Path(cache).expanduser() / f"{path.name}.{digest}.index.npy"


def _index_name(path: DataFile) -> str:
    return f".{path.name}.index.npy"


def open_indexes(
    files: Sequence[DataFile], kind: Format, cache: str | None = None
) -> list[Indices]:
    """The index of each file, without its head; builds missing or stale indexes.

    Processes that run this at the same time, such as the ranks of a host, begin with different
    files and use the indexes of the others: they share the work without waiting for each other.

    Raises:
        UserError: a file is broken or cannot be read, or there is no directory for the index of a
            remote file.
    """
    _remove_leftovers(files, cache)
    order = list(range(len(files)))
    random.Random(os.getpid()).shuffle(order)
    remote = [i for i in order if isinstance(files[i], RemoteFile)]
    found = {i: _open(files[i], kind, cache) for i in order if i not in {*remote}}
    if remote:
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            opened = pool.map(lambda i: _open(files[i], kind, cache), remote)
            found |= dict(zip(remote, opened, strict=True))
    return [found[i] for i in range(len(files))]


def build_indexes(
    files: Sequence[DataFile], kind: Format, cache: str | None, ranks: RankGroup
) -> int:
    """Build the missing and stale indexes of all files, shared among ranks.

    Args:
        ranks: participants; each calls this with the same arguments.

    Returns:
        The number of indexes built.

    Raises:
        UserError: on every rank, if a file is broken or an index cannot be written.
    """
    first = ranks.rank == 0
    plan = on_all_ranks(ranks, lambda: _plan(files, kind, cache, ranks.size) if first else None)[0]
    assert plan is not None
    own = [n for n, each in enumerate(plan.ranges) if each[3] == ranks.rank]
    try:
        on_all_ranks(ranks, lambda: _scan(plan, own, kind, cache))
        on_all_ranks(ranks, lambda: _join(plan, own, kind, cache))
    finally:
        for number in own:
            part = _part(plan, number, cache)
            if part is not None:
                part.unlink(missing_ok=True)
    return len(plan.files)


def _plan(files: Sequence[DataFile], kind: Format, cache: str | None, ranks: int) -> _Plan:
    if cache is not None:
        Path(cache).expanduser().mkdir(parents=True, exist_ok=True)
    _remove_leftovers(files, cache)
    stale = [(path, _head(path)) for path in files if _load(path, cache) is None]
    ranges = []
    for number, (_, head) in enumerate(stale):
        size = int(head[1])
        # The parts of a remote file's index would have no common directory.
        splits = kind.splits and not isinstance(stale[number][0], RemoteFile)
        step = _RANGE_BYTES if splits else max(size, 1)
        ranges += [(number, at, min(at + step, size)) for at in range(0, size, step)]
    owners = assign_files([stop - start for _, start, stop in ranges], ranks) if ranges else []
    assigned = [(*each, owner) for each, owner in zip(ranges, owners, strict=True)]
    return _Plan(stale, assigned, secrets.token_hex(4))


def _part(plan: _Plan, number: int, cache: str | None) -> Path | None:
    """Temporary file of a part of an index; None: the index is stored at once."""
    path = index_path(plan.files[plan.ranges[number][0]][0], cache)
    if path is None:
        return None
    return path.with_name(f".{path.name.strip('.')}.{plan.tag}.{number}.tmp.npy")


def _scan(plan: _Plan, own: Sequence[int], kind: Format, cache: str | None) -> None:
    for number in own:
        file, start, stop, _ = plan.ranges[number]
        path, head = plan.files[file]
        found, part = kind.scan(path, start, stop), _part(plan, number, cache)
        if part is None:
            assert isinstance(path, RemoteFile)
            _store(path, _whole(head, [found], kind))
        else:
            np.save(part, found)


def _join(plan: _Plan, own: Sequence[int], kind: Format, cache: str | None) -> None:
    """Write the indexes of those files whose first range belongs to this rank."""
    for first in own:
        file, start, _, _ = plan.ranges[first]
        path, head = plan.files[file]
        kept = index_path(path, cache)
        if start or kept is None:
            continue
        numbers = [n for n, each in enumerate(plan.ranges) if each[0] == file]
        parts = [np.load(part) for n in numbers if (part := _part(plan, n, cache)) is not None]
        _write(kept, _whole(head, parts, kind))


def _store(path: RemoteFile, whole: Indices) -> None:
    """Write an index next to a remote file."""
    url, content = path.sibling(_index_name(path)), io.BytesIO()
    np.save(content, whole)
    try:
        write_url(url, content.getvalue())
    except Exception as error:  # each file system has errors of its own
        raise UserError(
            f"{url}: cannot be written ({error or type(error).__name__}): choose a local directory "
            "for the indexes with --cache"
        ) from None


def _open(path: DataFile, kind: Format, cache: str | None) -> Indices:
    found = _load(path, cache)
    if found is not None:
        return found
    head, kept = _head(path), index_path(path, cache)
    if kept is None:
        raise UserError(
            f"{path}: there is no index next to this remote file: name a directory for indexes "
            f"(cache), or create them with `hvdtrain data index --input {path}`"
        )
    whole = _whole(head, [kind.scan(path, 0, int(head[1]))], kind)
    try:
        if cache is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
        _write(kept, whole)
    except OSError as error:
        logger.warning(
            "%s: its index cannot be stored (%s), so each process builds it at each start; "
            "configure a cache directory for indexes",
            path,
            error.strerror,
        )
    return whole[len(head) :]


def _remove_leftovers(files: Sequence[DataFile], cache: str | None) -> None:
    indexes = [index_path(path, cache) for path in files]
    for directory in {index.parent for index in indexes if index is not None}:
        remove_leftovers(directory, f".*.index.npy.{'?' * 8}.tmp.npy")


def _load(path: DataFile, cache: str | None) -> Indices | None:
    """The stored index; None if there is none, or if the file has changed since."""
    kept, head = index_path(path, cache), _head(path)
    try:
        # Access to an array is several times as fast as to a memmap.
        found = None if kept is None else np.asarray(np.load(kept, mmap_mode="r"))
    except (OSError, ValueError, EOFError):
        found = None
    if found is None and isinstance(path, RemoteFile):
        found = _load_from_url(path)
        if found is not None and kept is not None and np.array_equal(found[: len(head)], head):
            kept.parent.mkdir(parents=True, exist_ok=True)
            _write(kept, found)
    if found is None or found.dtype != np.int64 or found.ndim != 1 or len(found) <= len(head):
        return None
    if not np.array_equal(found[: len(head)], head):
        logger.info("%s has changed since its index was built; building it again", path)
        return None
    return found[len(head) :]


def _load_from_url(path: RemoteFile) -> Indices | None:
    """The index next to a remote file; None if there is none."""
    try:
        found: Indices = np.load(io.BytesIO(read_url(path.sibling(_index_name(path)))))
        return found
    except (OSError, ValueError, EOFError, UserError):  # servers may forbid to look for files
        return None


def _head(path: DataFile) -> Indices:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return np.array([_VERSION, stat.st_size, stat.st_mtime_ns], dtype=np.int64)


def _whole(head: Indices, parts: Sequence[Indices], kind: Format) -> Indices:
    return np.concatenate([head, *parts, *([head[1:2]] if kind.splits else [])])


def _write(kept: Path, whole: Indices) -> None:
    """Replace an index atomically: concurrent readers see the new index or the previous one."""
    new = kept.with_name(f".{kept.name.strip('.')}.{secrets.token_hex(4)}.tmp.npy")
    with hidden_copy(new):
        # Exclusive creation: the name of the lock is derived from the name of the copy.
        with new.open("xb") as file:
            np.save(file, whole)
        new.replace(kept)
