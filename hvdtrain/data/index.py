"""Where the samples of large files begin: found once, kept beside the files.

The index of a file is an array of int64 in the .npy format, so that it is memory-mapped: a head of
three numbers (version of the format, size and time of change of the file that it is of), and then
ascending numbers: of a file with n samples n + 1 offsets in bytes, or of Parquet the rows before
each row group, and all.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.data.files import deal
from hvdtrain.data.hidden_copy import hidden_copy, remove_leftovers
from hvdtrain.data.order import Indices
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.runtime.mpi import Ranks, on_all_ranks

_VERSION = 1
# What one rank scans at a time, where a scan can begin anywhere in a file.
_PIECE_BYTES = 1 << 26


@dataclass(frozen=True)
class Format:
    """A kind of file that holds many samples.

    Args:
        name: of a file.
        suffixes: of its files.
        scan: of a path, start and stop: the numbers of the index, of samples that begin at the
            bytes start to stop - 1; raises UserError where the file is broken.
        splits: a scan can begin anywhere, and the file's size is the last number; else a scan
            sees the whole file.
    """

    name: str
    suffixes: tuple[str, ...]
    scan: Callable[[Path, int, int], Indices]
    splits: bool = False


@dataclass(frozen=True)
class _Plan:
    """What all ranks do together; rank 0 makes it.

    Args:
        files: of which there is no index that is up to date, and their heads
        pieces: (number in `files`, start, stop, rank that scans it)
        tag: tells the temporary files of this run from those of another
    """

    files: list[tuple[Path, Indices]]
    pieces: list[tuple[int, int, int, int]]
    tag: str


def index_path(path: Path, cache: str | None) -> Path:
    """Beside the file, hidden; or in the folder `cache`, where files of all folders may meet."""
    if cache is None:
        return path.with_name(f".{path.name}.index.npy")
    digest = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    return Path(cache).expanduser() / f"{path.name}.{digest}.index.npy"


def open_indexes(files: Sequence[Path], kind: Format, cache: str | None = None) -> list[Indices]:
    """The index of each file, without its head; one that is missing or stale is made.

    Processes that come here at the same time, such as the ranks of a host, begin with different
    files and take what another has made: they share the work without waiting for each other.

    Raises:
        UserError: a file is broken or cannot be read.
    """
    _remove_leftovers(files, cache)
    order = list(range(len(files)))
    random.Random(os.getpid()).shuffle(order)
    found = {i: _open(files[i], kind, cache) for i in order}
    return [found[i] for i in range(len(files))]


def build_indexes(files: Sequence[Path], kind: Format, cache: str | None, ranks: Ranks) -> int:
    """Makes the missing and stale ones of all files, shared among ranks.

    Args:
        ranks: who takes part; each calls this with the same arguments.

    Returns:
        How many were made.

    Raises:
        UserError: on every rank, if a file is broken or an index cannot be written.
    """
    first = ranks.rank == 0
    plan = on_all_ranks(ranks, lambda: _plan(files, kind, cache, ranks.size) if first else None)[0]
    assert plan is not None
    own = [n for n, piece in enumerate(plan.pieces) if piece[3] == ranks.rank]
    try:
        on_all_ranks(ranks, lambda: _scan(plan, own, kind, cache))
        on_all_ranks(ranks, lambda: _join(plan, own, kind, cache))
    finally:
        for number in own:
            _part(plan, number, cache).unlink(missing_ok=True)
    return len(plan.files)


def _plan(files: Sequence[Path], kind: Format, cache: str | None, ranks: int) -> _Plan:
    if cache is not None:
        Path(cache).expanduser().mkdir(parents=True, exist_ok=True)
    _remove_leftovers(files, cache)
    stale = [(path, _head(path)) for path in files if _load(path, cache) is None]
    pieces = []
    for number, (_, head) in enumerate(stale):
        size = int(head[1])
        step = _PIECE_BYTES if kind.splits else max(size, 1)
        pieces += [(number, at, min(at + step, size)) for at in range(0, size, step)]
    owners = deal([stop - start for _, start, stop in pieces], ranks) if pieces else []
    dealt = [(*piece, owner) for piece, owner in zip(pieces, owners, strict=True)]
    return _Plan(stale, dealt, secrets.token_hex(4))


def _part(plan: _Plan, number: int, cache: str | None) -> Path:
    path = index_path(plan.files[plan.pieces[number][0]][0], cache)
    return path.with_name(f".{path.name.strip('.')}.{plan.tag}.{number}.tmp.npy")


def _scan(plan: _Plan, own: Sequence[int], kind: Format, cache: str | None) -> None:
    for number in own:
        file, start, stop, _ = plan.pieces[number]
        np.save(_part(plan, number, cache), kind.scan(plan.files[file][0], start, stop))


def _join(plan: _Plan, own: Sequence[int], kind: Format, cache: str | None) -> None:
    """Writes the indexes of those files whose first piece is this rank's."""
    for first in own:
        file, start, _, _ = plan.pieces[first]
        if start:
            continue
        numbers = [n for n, piece in enumerate(plan.pieces) if piece[0] == file]
        parts = [np.load(_part(plan, number, cache)) for number in numbers]
        path, head = plan.files[file]
        _write(path, cache, _whole(head, parts, kind))


def _open(path: Path, kind: Format, cache: str | None) -> Indices:
    found = _load(path, cache)
    if found is not None:
        return found
    head = _head(path)
    whole = _whole(head, [kind.scan(path, 0, int(head[1]))], kind)
    try:
        if cache is not None:
            Path(cache).expanduser().mkdir(parents=True, exist_ok=True)
        _write(path, cache, whole)
    except OSError as error:
        logger.warning(
            "%s: its index cannot be kept (%s), so each process makes its own at each start; "
            "name a folder for indexes",
            path,
            error.strerror,
        )
    return whole[len(head) :]


def _remove_leftovers(files: Sequence[Path], cache: str | None) -> None:
    for folder in {index_path(path, cache).parent for path in files}:
        remove_leftovers(folder, f".*.index.npy.{'?' * 8}.tmp.npy")


def _load(path: Path, cache: str | None) -> Indices | None:
    """None where there is none, or the file has changed since."""
    kept = index_path(path, cache)
    try:
        found = np.load(kept, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    head = _head(path)
    if found.dtype != np.int64 or found.ndim != 1 or len(found) <= len(head):
        return None
    if not np.array_equal(found[: len(head)], head):
        logger.info("%s has changed since its index was made: it is made anew", path)
        return None
    return found[len(head) :]


def _head(path: Path) -> Indices:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return np.array([_VERSION, stat.st_size, stat.st_mtime_ns], dtype=np.int64)


def _whole(head: Indices, parts: Sequence[Indices], kind: Format) -> Indices:
    return np.concatenate([head, *parts, *([head[1:2]] if kind.splits else [])])


def _write(path: Path, cache: str | None, whole: Indices) -> None:
    """A process that reads it meanwhile sees all of it, or the one before."""
    kept = index_path(path, cache)
    new = kept.with_name(f".{kept.name.strip('.')}.{secrets.token_hex(4)}.tmp.npy")
    with hidden_copy(new):
        # Exclusively: the name of the lock announces that of the copy.
        with new.open("xb") as file:
            np.save(file, whole)
        new.replace(kept)
