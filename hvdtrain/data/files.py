"""Files of datasets: which ones a pattern names, their fingerprint, temporary copies."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import sysconfig
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hvdtrain.data import remote
from hvdtrain.data.file_kinds import described
from hvdtrain.data.remote import DataFile, RemoteFile
from hvdtrain.errors import UserError
from hvdtrain.files import FileLock
from hvdtrain.log import logger
from hvdtrain.runtime.environment import launched_rank

# Parts of the standard library that are not installed everywhere, or are mostly tables.
_NOT_SOURCE = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "distutils",
    "ensurepip", "__pycache__", "encodings", "pydoc_data",
}  # fmt: skip
# Content of a fingerprint: at most 64 MiB of all files together, or one block per file if there are
# more files; at most 4 MiB of one file.
_BLOCK_BYTES = 1 << 14
_BLOCKS = 1 << 12
_BLOCKS_PER_FILE = 1 << 8
# A copy without a lock (from an older version, or a file system without locks) is removed if
# nothing was written to it for this long.
STALE_SECONDS = 3600.0
_LOCAL = "file://"
# Files that belong to data, whatever their size.
_ABOUT_DATA = (
    "tokens.json", ".idx", ".ds.index", ".ds.metadata", ".ds.loss", "state.json",
    "dataset_info.json",
)  # fmt: skip
_SHOWN_NAMES = 5

File = TypeVar("File", Path, RemoteFile)


def expand(
    key: str,
    patterns: Sequence[str],
    suffixes: tuple[str, ...] | None = None,
    kind: str = "token file",
) -> list[Path]:
    """The non-empty local files that match the patterns, sorted, without duplicates.

    Args:
        key: the configuration key the patterns come from, for messages.
        patterns: files, directories (all files below) or globs (`**` too). Hidden files and
            directories are skipped, unless a pattern names them.
        suffixes: if given, other files are refused or skipped: see `_choose`.
        kind: kind of file with these suffixes, for messages.

    Raises:
        UserError: a pattern matches no file, only empty files, or no file with these suffixes.
    """
    found: set[Path] = set()
    for pattern in patterns:
        if remote.is_url(pattern) and not pattern.startswith(_LOCAL):
            raise UserError(f"{key}: {pattern}: this data is read from local files, not from URLs")
        pattern = pattern.removeprefix(_LOCAL)
        paths = _match(pattern)
        if not paths:
            if os.path.isdir(pattern):
                raise UserError(f"{key}: {pattern} has no files; hidden ones are skipped")
            raise UserError(f"{key}: no file matches {pattern!r} (from {os.getcwd()})")
        try:
            sizes = {path: path.stat().st_size for path in paths}
        except OSError as error:
            raise UserError(f"{key}: {error.filename}: {error.strerror}") from None
        chosen = _choose(key, pattern, sizes, suffixes, kind) if suffixes else paths
        full = {path for path in chosen if sizes[path]}
        if not full:
            raise UserError(f"{key}: every file that matches {pattern!r} is empty")
        found |= full
    return sorted(_once(found) if suffixes else found)


def find_files(
    key: str,
    patterns: Sequence[str],
    suffixes: tuple[str, ...] | None = None,
    kind: str = "token file",
) -> list[DataFile]:
    """Same as `expand`, but patterns may be URLs: first the local files, then the remote ones."""
    urls = [pattern for pattern in patterns if remote.is_url(pattern)]
    urls = [pattern for pattern in urls if not pattern.startswith(_LOCAL)]
    local = [pattern for pattern in patterns if pattern not in urls]
    found: list[DataFile] = [*expand(key, local, suffixes, kind)] if local else []

    def choose(url: str, sizes: dict[RemoteFile, int]) -> list[RemoteFile]:
        return _choose(key, url, sizes, suffixes, kind) if suffixes else [*sizes]

    behind_urls = remote.find(key, urls, suffixes, choose) if urls else []
    return [*found, *(_once(behind_urls) if suffixes else behind_urls)]


def _once(files: Collection[File]) -> list[File]:
    """Drop compressed files whose decompressed ones are among the files, too."""
    names = {*map(str, files)}
    return [
        file
        for file in files
        if file.suffix not in remote.COMPRESSED or str(file).removesuffix(file.suffix) not in names
    ]


def _match(pattern: str) -> list[Path]:
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**")
    return [Path(p) for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]


def _choose(
    key: str, pattern: str, sizes: Mapping[File, int], suffixes: tuple[str, ...], kind: str
) -> list[File]:
    """The files with one of the suffixes, of those that a pattern matches.

    A warning names the others if they are more than a hundredth of the data. What lies next to
    data, such as a README, is smaller.

    Args:
        sizes: the files, and their sizes in bytes.

    Raises:
        UserError: no file has such a suffix, or one would have it if it was not compressed.
    """
    chosen = [path for path in sizes if path.name.endswith(suffixes)]
    others = [path for path in sizes if not path.name.endswith(suffixes)]
    known = f"{kind} ({remote.shown(suffixes)})"
    others.sort(key=lambda path: (-sizes[path], str(path)))
    if not chosen:
        content = described(others[0])
        if len(others) == 1:
            hint = "; make some with `hvdtrain data tokenize`" if kind == "token file" else ""
            hint = f", but {content}" if content else hint
            raise UserError(f"{key}: {others[0]} is not a {known}{hint}")
        hint = f"; {others[0].name} is {content}" if content else ""
        raise UserError(
            f"{key}: {pattern} has no {known}, only {_listed([path.name for path in others])}{hint}"
        )
    decompressed = {path: str(path).removesuffix(path.suffix) for path in others}
    compressed = [
        path
        for path in others
        if path.suffix in remote.COMPRESSED and decompressed[path].endswith(suffixes)
    ]
    names = {str(path) for path in chosen}
    for path in compressed:
        if decompressed[path] not in names:
            content = described(path)
            raise UserError(
                f"{key}: {path} would be skipped{content and f': it is {content}'}, or name the "
                f"other files, such as with '*{suffixes[0]}'"
            )
    others = [p for p in others if p not in compressed and not p.name.endswith(_ABOUT_DATA)]
    if 100 * sum(sizes[path] for path in others) > sum(sizes[path] for path in chosen):
        warn_of_skipped(f"{key}: {pattern}", f"a {known}", [path.name for path in others])
    return chosen


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")


def warn_of_skipped(where: str, kind: str, names: Sequence[str]) -> None:
    """Warn of files that are not of a kind; once, on rank 0: each rank looks several times."""
    if launched_rank() == 0:
        _warn(f"{where}: skipped, because not {kind}: {_listed(names)}")


@cache
def _warn(message: str) -> None:
    logger.warning("%s", message)


def standard_library() -> list[Path]:
    """The .py files of this Python's standard library, without its tests: about 10 MB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path
        for path in root.rglob("*.py")
        if not _NOT_SOURCE & set(path.relative_to(root).parts) and path.stat().st_size > 0
    )


def names_below_root(paths: Sequence[DataFile]) -> list[str]:
    """Names of files, without the part of their directories that all have in common."""
    names = [str(path) for path in paths]
    if len({isinstance(path, RemoteFile) for path in paths}) == 2:
        return names
    root = os.path.commonpath([os.path.dirname(name) or "." for name in names]) or "."
    return [os.path.relpath(name, root) for name in names]


def split_files(
    paths: Sequence[DataFile], fraction: float
) -> tuple[list[DataFile], list[DataFile]]:
    """Split files into train and validation by a hash of their paths below their common directory.

    Args:
        paths: at least two files.
        fraction: fraction of the bytes for validation, at least one file and never all.

    Returns:
        (train, validation), each sorted.
    """
    names = dict(zip(paths, names_below_root(paths), strict=True))
    ranked = sorted(paths, key=lambda path: hashlib.sha256(names[path].encode()).digest())
    wanted = fraction * sum(path.stat().st_size for path in paths)
    count, size = 0, 0
    while count < len(ranked) - 1 and (count == 0 or size < wanted):
        size += ranked[count].stat().st_size
        count += 1
    return _in_order(ranked[count:]), _in_order(ranked[:count])


def _in_order(files: Sequence[DataFile]) -> list[DataFile]:
    """Sort local files by path, and the remote files after them by URL."""
    remote_files = [file for file in files if isinstance(file, RemoteFile)]
    local = [file for file in files if isinstance(file, Path)]
    return [*sorted(local), *sorted(remote_files, key=str)]


def assign_files(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign files to ranks: neighbors stay together, and ranks get about the same bytes.

    A file belongs to the rank whose even share of all bytes contains the middle of the file.

    Args:
        sizes: sizes of the files in bytes, at least one of them > 0.

    Returns:
        the rank of each file.
    """
    ends = list(accumulate(sizes))
    middles = [2 * end - size for end, size in zip(ends, sizes, strict=True)]
    return [min(middle * ranks // (2 * ends[-1]), ranks - 1) for middle in middles]


# --- fingerprints: a run must resume with the data that it started with -------


class FileFacts(NamedTuple):
    """A file at the time of a fingerprint.

    Args:
        name: below the common directory of all files.
        samples: number of samples in it.
        size: in bytes.
        content: digest of what the fingerprint has of its content.
    """

    name: str
    samples: int
    size: int
    content: str


class Fingerprint(str):
    """16 hex digits.

    Attributes:
        files: the files that it covers.
    """

    files: tuple[FileFacts, ...]

    def __new__(cls, digits: str, files: Iterable[FileFacts] = ()) -> Fingerprint:
        made = super().__new__(cls, digits)
        made.files = tuple(files)
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.files


def files_of(fingerprint: str | None) -> tuple[FileFacts, ...]:
    """Return the files that a fingerprint covers; none if it does not list them."""
    return fingerprint.files if isinstance(fingerprint, Fingerprint) else ()


def of_files(paths: Sequence[DataFile], samples: Sequence[int]) -> Fingerprint:
    """Fingerprint of files: paths below the common directory, sample counts, sizes and content.

    Small files are read completely, larger ones in evenly spaced blocks: at most 4 MiB per file,
    and 64 MiB of all files or one block of each. Changes between the blocks are not detected. The
    fingerprint is the same on all hosts and ignores modification times, so files may be copied. The
    version that its server tells stands for the content of a remote file.

    Args:
        samples: number of samples of each file.

    Raises:
        UserError: a file cannot be read.
    """
    digest = hashlib.sha256()
    most = min(max(_BLOCKS // len(paths), 1), _BLOCKS_PER_FILE)
    files = []
    for path, name, count in zip(paths, names_below_root(paths), samples, strict=True):
        head, content = f"{name}\0{count}\n".encode(), hashlib.sha256()
        digest.update(head)
        for block in _blocks(path, most):
            digest.update(block)
            content.update(block)
        files.append(FileFacts(name, count, path.stat().st_size, content.hexdigest()[:16]))
    return Fingerprint(digest.hexdigest()[:16], files)


def first_change(before: Sequence[FileFacts], now: Sequence[FileFacts]) -> str | None:
    """Describe the worst change of a file between two fingerprints; None: all are the same."""
    found, known = {file.name: file for file in now}, {file.name for file in before}
    pairs = [(old, found[old.name]) for old in before if old.name in found]
    changes = [
        *(f"{f.name} ({f.samples} samples) has disappeared" for f in before if f.name not in found),
        *(
            f"{new.name} has shrunk from {old.size} to {new.size} bytes"
            for old, new in pairs
            if new.size < old.size
        ),
        *(f"{file.name} has been added" for file in now if file.name not in known),
        *(
            f"{new.name} has changed ({old.samples} samples before, {new.samples} now)"
            for old, new in pairs
            if new != old
        ),
    ]
    return changes[0] if changes else None


def _blocks(path: DataFile, most: int) -> Iterator[bytes]:
    """Yield the size, and the whole content or `most` blocks; the last block ends with the file."""
    if isinstance(path, RemoteFile):
        yield from (number.to_bytes(8, "little") for number in path.stat())
        return
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            yield size.to_bytes(8, "little")
            last = max(size - _BLOCK_BYTES, 0)
            if size <= most * _BLOCK_BYTES:
                places = range(0, size, _BLOCK_BYTES)
            elif most == 1:
                places = range(last, last + 1)
            else:
                places = [last * n // (most - 1) for n in range(most)]  # type: ignore[assignment]
            for place in places:
                yield os.pread(file.fileno(), _BLOCK_BYTES, place)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


# --- temporary copies ---------------------------------------------------------
#
# The writer holds a lock file next to its copy until it has renamed or removed the copy. The
# kernel, or the file server, frees the lock when the writer dies, and the next start removes the
# copy. Other hosts see that too, so no process numbers are compared.


@contextmanager
def hidden_copy(path: Path) -> Iterator[None]:
    """Hold the lock of a copy; on exit, remove the copy unless it was renamed.

    Raises:
        OSError: the directory cannot be written.
    """
    lock = FileLock(_lock_of(path))
    lock.open()
    try:
        lock.attempt()
        yield
    finally:
        _remove(path)
        _lock_of(path).unlink(missing_ok=True)
        lock.close()


def remove_leftovers(directory: Path, pattern: str) -> None:
    """Remove the copies in a directory whose writers are dead.

    Args:
        pattern: glob of their names.
    """
    with suppress(OSError):
        for path in directory.glob(pattern):
            _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    lock = FileLock(_lock_of(path))
    try:
        known = False
        if _lock_of(path).exists():
            lock.open()
            known = lock.attempt()
        if lock.held or (not known and _idle_seconds(path) > STALE_SECONDS):
            _remove(path)
            _lock_of(path).unlink(missing_ok=True)
            if not path.exists():
                logger.info("removed %s, whose writer was killed", path)
    except OSError:
        pass  # another process removed it, or it belongs to another user
    finally:
        lock.close()


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _idle_seconds(path: Path) -> float:
    newest = max(p.stat().st_mtime for p in (path, *(path.iterdir() if path.is_dir() else ())))
    return time.time() - newest


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
