"""Compressed files: read from the beginning, or from a decompressed copy at any place."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import io
import lzma
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from hvdtrain.data.remote import DataFile, RemoteFile, beginning, open_file
from hvdtrain.errors import UserError
from hvdtrain.files import FileLock, sync_directory
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
_POLL_SECONDS = 0.2


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


class _Decompressed(io.RawIOBase):
    """The content of a compressed file, with errors that name the file."""

    def __init__(self, file: DataFile) -> None:
        self._name = file
        self._packed = open_file(file)
        self._content: Any = _decompressor(file)(self._packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._content.readinto(buffer))
        except Exception as error:  # each library has errors of its own
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise UserError(
                f"{self._name} cannot be decompressed ({error}): it is truncated or damaged; copy "
                "it again"
            ) from None

    def close(self) -> None:
        self._content.close()
        self._packed.close()
        super().close()


def _decompressor(file: DataFile) -> Callable[[BinaryIO], Any]:
    if file.suffix == ".gz":
        return lambda packed: gzip.GzipFile(fileobj=packed)
    if file.suffix == ".bz2":
        return bz2.BZ2File
    if file.suffix == ".xz":
        return lzma.LZMAFile
    for module in ("compression.zstd", "backports.zstd"):  # the first one since Python 3.14
        with suppress(ImportError):
            found: Callable[[BinaryIO], Any] = importlib.import_module(module).ZstdFile
            return found
    raise UserError(f"{file}: reading Zstandard needs a package: pip install 'hvdtrain[zstd]'")


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
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _make(file, kept)
        for older in directory.glob(f".{digest}.*.{name}"):
            if older != kept:
                older.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{file}: its decompressed copy cannot be written ({kept}: {error.strerror}): set "
            "data.cache to a directory with space for it, or decompress it"
        ) from None
    return kept


def _make(file: DataFile, kept: Path) -> None:
    """Write the copy, unless it is there, or another process writes it meanwhile."""
    new = kept.with_name(f"{kept.name}.tmp")
    lock = FileLock(new.with_name(f"{new.name}.lock"))
    while not kept.exists():
        lock.open()
        known = lock.attempt()
        if not lock.held and known:
            HEARTBEAT.advance()  # another process is decompressing it
            time.sleep(_POLL_SECONDS)
            continue
        try:
            if not kept.exists():
                with open_decompressed(file) as source, new.open("wb") as copy:
                    shutil.copyfileobj(source, copy, _BUFFER_BYTES)
                    copy.flush()
                    os.fsync(copy.fileno())
                new.replace(kept)
                sync_directory(kept.parent)
        finally:
            new.unlink(missing_ok=True)
            new.with_name(f"{new.name}.lock").unlink(missing_ok=True)
    lock.close()
