"""Fingerprints of large files: a run must resume with the data that it started with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.errors import UserError

_BLOCK = 1 << 14  # bytes
_BLOCKS = 1 << 12  # 64 MiB of all files together, or one block per file if there are more files
_MOST_BLOCKS = 1 << 8  # of one file: 4 MiB


class Fingerprint(str):
    """16 hex digits.

    Attributes:
        former: fingerprint of the same data in checkpoints of older versions, which still resume.
    """

    former: str

    def __new__(cls, digits: str, former: str) -> Fingerprint:
        made = super().__new__(cls, digits)
        made.former = former
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.former


def former_of(fingerprint: str | None) -> str | None:
    """Return the fingerprint that older versions computed of the same data; None if unchanged."""
    return fingerprint.former if isinstance(fingerprint, Fingerprint) else None


def of_files(paths: Sequence[Path], samples: Sequence[int]) -> Fingerprint:
    """Fingerprint of files: paths below the common directory, sample counts, sizes and content.

    Small files are read completely, larger ones in evenly spaced blocks: at most 4 MiB per file,
    and 64 MiB of all files or one block of each. Changes between the blocks are not detected. The
    fingerprint is the same on all hosts and ignores modification times, so files may be copied.

    Args:
        samples: of each file.

    Raises:
        UserError: a file cannot be read.
    """
    root = os.path.commonpath([path.parent for path in paths])
    former, digest = hashlib.sha256(), hashlib.sha256()
    most = min(max(_BLOCKS // len(paths), 1), _MOST_BLOCKS)
    for path, count in zip(paths, samples, strict=True):
        name = f"{os.path.relpath(path, root)}\0{count}\n".encode()
        former.update(name)
        digest.update(name)
        for block in _blocks(path, most):
            digest.update(block)
    return Fingerprint(digest.hexdigest()[:16], former.hexdigest()[:16])


def _blocks(path: Path, most: int) -> Iterator[bytes]:
    """Yield the size, and the whole content or `most` blocks; the last block ends with the file."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            yield size.to_bytes(8, "little")
            last = max(size - _BLOCK, 0)
            if size <= most * _BLOCK:
                places = range(0, size, _BLOCK)
            elif most == 1:
                places = range(last, last + 1)
            else:
                places = [last * n // (most - 1) for n in range(most)]  # type: ignore[assignment]
            for place in places:
                yield os.pread(file.fileno(), _BLOCK, place)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
