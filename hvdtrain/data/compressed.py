"""Compressed files: read from the beginning, or from a decompressed copy at any place."""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import importlib
import io
import lzma
import os
import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from hvdtrain.data.files import STALE_SECONDS, hidden_copy, remove_leftovers
from hvdtrain.data.remote import DataFile, RemoteFile, beginning, open_file
from hvdtrain.errors import UserError
from hvdtrain.files import FileLock, sync_directory
from hvdtrain.log import logger
from hvdtrain.runtime.heartbeat import HEARTBEAT

_ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n, 0x2A, 0x4D, 0x18]) for n in range(16)))
# Suffix -> what a file begins with.
_MAGIC: dict[str, tuple[bytes, ...]] = {
    ".gz": (b"\x1f\x8b",),
    ".zst": _ZSTD,
    ".bz2": (b"BZh",),
    ".xz": (b"\xfd7zXZ\x00",),
}
SUFFIXES = tuple(_MAGIC)
_BUFFER_BYTES = 1 << 20
_POLL_SECONDS = 0.5
_LOOKS_PER_LISTING = 10  # a directory may have many files, and many ranks may wait


def also_compressed(suffixes: Sequence[str]) -> tuple[str, ...]:
    """The suffixes of files, and of compressed ones."""
    return (*suffixes, *(suffix + packed for suffix in suffixes for packed in SUFFIXES))


def is_compressed(file: DataFile) -> bool:
    return file.suffix in SUFFIXES


def open_decompressed(file: DataFile) -> BinaryIO:
    """Open a file for reading from its beginning; decompressed, as its suffix says.

    A compressed file may consist of several members or frames. Reading raises UserError if it is
    truncated or broken.

    Raises:
        UserError: it is not compressed, although its name says so, or a package is missing.
        OSError: it cannot be read.
    """
    if not is_compressed(file):
        return open_file(file)
    if not beginning(file, 8).startswith(_MAGIC[file.suffix]):
        raise UserError(f"{file} is not compressed, although its name ends with {file.suffix}")
    return cast(BinaryIO, io.BufferedReader(_Decompressed(file), _BUFFER_BYTES))


def decompressed(file: Path, content: Any, suffix: str) -> bytes:
    """Decompress the content of a file, or a part of it, in memory.

    Args:
        suffix: one of SUFFIXES, which the file may not have.

    Raises:
        UserError: it is truncated or damaged, or a package is missing.
    """
    if suffix == ".zst":
        decompress: Callable[[Any], bytes] = _zstd(file).decompress
    else:
        decompress = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}[
            suffix
        ]
    try:
        found = decompress(content)
    except Exception as error:  # each library has errors of its own
        raise _damaged(file, error) from None
    return found


def _damaged(file: DataFile, error: Exception) -> UserError:
    return UserError(
        f"{file} cannot be decompressed ({error}): it is truncated or damaged; copy it again"
    )


class _Decompressed(io.RawIOBase):
    """The content of a compressed file, with errors that name the file."""

    def __init__(self, file: DataFile) -> None:
        new = _decompressor(file)
        self._name = file
        self._packed = open_file(file)
        self._content: Any = new(self._packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._content.readinto(buffer))
        except UserError:  # of a remote file
            raise
        except Exception as error:  # each library has errors of its own
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise _damaged(self._name, error) from None

    def close(self) -> None:
        self._content.close()
        self._packed.close()
        super().close()


def _decompressor(file: DataFile) -> Callable[[BinaryIO], io.BufferedIOBase | io.RawIOBase]:
    if file.suffix == ".gz":
        return lambda packed: gzip.GzipFile(fileobj=packed)
    if file.suffix == ".zst":
        return partial(_Frames, new=_zstd(file).ZstdDecompressor)
    new = bz2.BZ2Decompressor if file.suffix == ".bz2" else lzma.LZMADecompressor
    return partial(_Frames, new=new)


def _zstd(file: DataFile) -> Any:
    for module in ("compression.zstd", "backports.zstd"):  # the first one since Python 3.14
        with suppress(ImportError):
            return importlib.import_module(module)
    raise UserError(f"{file}: reading Zstandard needs a package: pip install 'hvdtrain[zstd]'")


class _Frames(io.RawIOBase):
    """The content of frames that follow each other.

    The libraries' own file objects ignore what follows a frame of bz2 and xz if it is not another
    frame, also a damaged one.

    Args:
        new: makes the decompressor of a frame, with the interface of bz2.BZ2Decompressor.
    """

    def __init__(self, packed: BinaryIO, new: Callable[[], Any]) -> None:
        self._packed, self._new, self._frame = packed, new, new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            packed = b""
            if self._frame.eof:
                packed = self._frame.unused_data.lstrip(b"\0")  # xz may pad its frames
                packed = packed or self._packed.read(_BUFFER_BYTES).lstrip(b"\0")
                if not packed:
                    return 0
                self._frame = self._new()
            elif self._frame.needs_input:
                packed = self._packed.read(_BUFFER_BYTES)
                if not packed:
                    raise EOFError("the last frame is not complete")
            content = self._frame.decompress(packed, len(buffer))
            if content:
                buffer[: len(content)] = content
                return len(content)


# --- decompressed copies -------------------------------------------------------


def readable_anywhere(files: Sequence[DataFile], cache: str | None) -> list[DataFile]:
    """Return the files, or a decompressed copy of each compressed one.

    A copy lies, hidden, next to its file, or in the directory `cache`; it is made once. Processes
    that need the same copies begin with different ones, and wait for those that others are making.

    Raises:
        UserError: a file cannot be decompressed, or a copy cannot be written.
    """
    found = {file: file for file in files if not is_compressed(file)}
    missing = [file for file in files if is_compressed(file)]
    random.Random(os.getpid()).shuffle(missing)
    for file in missing:
        found[file] = _copy(file, cache)
    return [found[file] for file in files]


def _copy(file: DataFile, cache: str | None) -> Path:
    if cache is None and isinstance(file, RemoteFile):
        raise UserError(
            f"{file}: a compressed file behind a URL needs a directory for its copy: set data.cache"
        )
    stat = file.stat()
    digest = hashlib.sha256(os.fsencode(str(file.absolute()))).hexdigest()[:16]
    version = f"{stat.st_size:x}-{stat.st_mtime_ns:x}"
    directory = Path(cache).expanduser() if cache is not None else Path(str(file)).parent
    name = file.name.removesuffix(file.suffix)
    kept = directory / f".{digest}.{version}.{name}"
    if kept.exists():
        return kept
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if _make(file, kept):
            # Copies of earlier versions, and their indexes.
            for older in directory.glob(f"*.{digest}.*"):
                if not older.name.lstrip(".").startswith(f"{digest}.{version}."):
                    older.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{file}: its decompressed copy cannot be written ({kept}: {error.strerror}): set "
            "data.cache to a directory with space for it, or decompress it"
        ) from None
    return kept


def _make(file: DataFile, kept: Path) -> bool:
    """Write the copy, unless another process does so meanwhile; return whether this one has.

    The lock only avoids that several processes do the same work: on a file system without locks,
    they do.

    Raises:
        UserError: the other process makes no progress.
    """
    lock = FileLock(kept.with_name(f"{kept.name}.lock"))
    size, grown_at, looks = -1, time.monotonic(), 0
    try:
        while not kept.exists():
            lock.open()
            if lock.attempt() and not lock.held:
                if looks == 0:
                    logger.info("%s: waiting for another process that decompresses it", file)
                if looks % _LOOKS_PER_LISTING == 0 and (now := _size_of_copies(kept)) != size:
                    size, grown_at = now, time.monotonic()
                    HEARTBEAT.advance()
                looks += 1
                if time.monotonic() - grown_at > STALE_SECONDS:
                    raise UserError(
                        f"{file}: the process that decompresses it has made no progress for "
                        f"{STALE_SECONDS:.0f} s; delete {kept}.lock if there is none"
                    )
                time.sleep(_POLL_SECONDS)
            elif not kept.exists():
                _decompress(file, kept)
                return True
        return False
    finally:
        if lock.held:
            kept.with_name(f"{kept.name}.lock").unlink(missing_ok=True)
        lock.close()


def _size_of_copies(kept: Path) -> int:
    found = 0
    for copy in kept.parent.glob(f"{glob.escape(kept.name)}.*.tmp"):
        with suppress(OSError):
            found += copy.stat().st_size
    return found


def _decompress(file: DataFile, kept: Path) -> None:
    logger.info("decompressing %s to %s", file, kept)
    remove_leftovers(kept.parent, f"{glob.escape(kept.name)}.*.tmp")
    new = kept.with_name(f"{kept.name}.{secrets.token_hex(4)}.tmp")
    with hidden_copy(new):
        with open_decompressed(file) as source, new.open("xb") as copy:
            while content := source.read(_BUFFER_BYTES):
                copy.write(content)
                HEARTBEAT.advance()
            copy.flush()
            os.fsync(copy.fileno())
        new.replace(kept)
    sync_directory(kept.parent)
