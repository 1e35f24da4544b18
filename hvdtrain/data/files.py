"""Expansion of configured globs to files, and the split into train and validation."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from hvdtrain.errors import UserError

# Parts of the standard library that are not installed everywhere, or are mostly tables.
_NOT_SOURCE = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "distutils",
    "ensurepip", "__pycache__", "encodings", "pydoc_data",
}  # fmt: skip


def expand(
    key: str,
    patterns: Sequence[str],
    suffixes: tuple[str, ...] | None = None,
    kind: str = "token file",
) -> list[Path]:
    """The non-empty files that match the patterns, sorted, without duplicates.

    Args:
        key: the configuration key the patterns come from, for messages.
        patterns: files, directories (all files below) or globs (`**` too).
        suffixes: if given, a file named directly must have one of them; other files
            found in directories and by globs are skipped.
        kind: of file with these suffixes, for messages.

    Raises:
        UserError: a pattern matches no file or only empty files; a wrong suffix.
    """
    found: set[Path] = set()
    for pattern in patterns:
        paths = _match(pattern)
        if suffixes and Path(pattern).is_file() and Path(pattern).suffix not in suffixes:
            raise UserError(
                f"{key}: {pattern} is not a {kind} (*{', *'.join(suffixes)})"
                + ("; make some with `hvdtrain data tokenize`" if kind == "token file" else "")
            )
        if suffixes:
            paths = [path for path in paths if path.suffix in suffixes]
        if not paths:
            raise UserError(f"{key}: no file matches {pattern!r} (from {os.getcwd()})")
        try:
            full = {path for path in paths if path.stat().st_size > 0}
        except OSError as error:
            raise UserError(f"{key}: {error.filename}: {error.strerror}") from None
        if not full:
            raise UserError(f"{key}: every file that matches {pattern!r} is empty")
        found |= full
    return sorted(found)


def _match(pattern: str) -> list[Path]:
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**")
    return [Path(p) for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]


def standard_library() -> list[Path]:
    """The .py files of this Python's standard library, without its tests: about 10 MB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path
        for path in root.rglob("*.py")
        if not _NOT_SOURCE & set(path.relative_to(root).parts) and path.stat().st_size > 0
    )


def split(paths: Sequence[Path], fraction: float) -> tuple[list[Path], list[Path]]:
    """Split files into train and validation by a hash of their paths below their common directory.

    Args:
        paths: at least two files.
        fraction: fraction of the bytes for validation, at least one file and never all.

    Returns:
        (train, validation), each sorted.
    """
    root = os.path.commonpath([path.parent for path in paths])
    ranked = sorted(paths, key=lambda p: hashlib.sha256(os.path.relpath(p, root).encode()).digest())
    wanted = fraction * sum(path.stat().st_size for path in paths)
    count, size = 0, 0
    while count < len(ranked) - 1 and (count == 0 or size < wanted):
        size += ranked[count].stat().st_size
        count += 1
    return sorted(ranked[count:]), sorted(ranked[:count])


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign files to ranks: neighbours stay together, and ranks get about the same bytes.

    A file belongs to the rank whose even share of all bytes contains the middle of the file.

    Args:
        sizes: of the files in bytes, at least one of them > 0.

    Returns:
        the rank of each file.
    """
    ends = list(accumulate(sizes))
    middles = [2 * end - size for end, size in zip(ends, sizes, strict=True)]
    return [min(middle * ranks // (2 * ends[-1]), ranks - 1) for middle in middles]
