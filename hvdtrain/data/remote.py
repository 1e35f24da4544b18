"""Files of datasets behind URLs of fsspec, and byte ranges of local and remote files.

Remote files are read in blocks, through fsspec's cache that loads the next block in the background.
The caches have threads and file systems have event loops, which do not survive a fork: each process
opens its own. A request that fails for a reason that may pass is repeated a few times.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from hvdtrain.errors import UserError
from hvdtrain.log import logger

T = TypeVar("T")

# Blocks that a process keeps of a file, and of all files: those that were read last.
_BLOCK_BYTES = 1 << 21
_BLOCKS_OF_FILE = 32
_CACHE_BYTES = 1 << 28
_OPEN_FILES = 64
# Requests that a process sends at a time when it looks at many files.
REQUESTS_AT_ONCE = 16
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
# Pauses before a failed request is repeated, in seconds.
_PAUSES = (0.5, 1.0, 2.0, 4.0)
_PERMANENT = (
    PermissionError, IsADirectoryError, NotImplementedError, ImportError, ValueError, TypeError,
)  # fmt: skip
# What file systems call the property that changes with a file's content, the best one first.
_VERSIONS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "Digest", "LastModified", "last_modified",
    "Last-Modified", "updated", "mtime", "created",
)  # fmt: skip


class RemoteStat(NamedTuple):
    """The fields of os.stat_result that datasets use; a version instead of a time."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL, with the properties of pathlib.Path that datasets use.

    Args:
        size: in bytes, when it was looked up.
        version: number that changes with the file's content (of its ETag or modification time);
            0 if the server tells none.
    """

    url: str
    size: int
    version: int

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return posixpath.basename(urlsplit(self.url).path)

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.name)[1]

    def absolute(self) -> RemoteFile:
        return self

    def stat(self) -> RemoteStat:
        return RemoteStat(self.size, self.version)

    def sibling(self, name: str) -> str:
        """URL of another file in the same directory."""
        return f"{self.url.rpartition('/')[0]}/{name}"

    def read_bytes(self) -> bytes:
        return read_url(self.url)


DataFile = Path | RemoteFile


def shown(suffixes: Sequence[str]) -> str:
    """Suffixes for messages, such as "*.jsonl, *.ndjson", without those of compressed files."""
    return ", ".join(f"*{suffix}" for suffix in suffixes if not suffix.endswith(COMPRESSED))


def is_url(pattern: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]+://", pattern) is not None


def find(
    key: str,
    patterns: Sequence[str],
    suffixes: tuple[str, ...] | None,
    choose: Callable[[str, dict[RemoteFile, int]], list[RemoteFile]],
) -> list[RemoteFile]:
    """The non-empty files that match URLs, sorted, without duplicates.

    Args:
        key: the configuration key the URLs come from, for messages.
        patterns: URLs of files, of directories (all files below), or with `*`.
        suffixes: a URL with one of them names a file; None: any suffix does.
        choose: (URL, files that match it and their sizes in bytes) -> the files to use.

    Raises:
        UserError: a URL matches no file, or its server cannot be reached.
    """
    kind = f" ({shown(suffixes)})" if suffixes else ""
    facts: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        of_patterns = pool.map(lambda pattern: _match(key, pattern, suffixes), patterns)
        for pattern, found in zip(patterns, of_patterns, strict=True):
            if not found:
                raise UserError(f"{key}: no file{kind} matches {pattern!r}")
            listed = {RemoteFile(url, info.get("size") or 0, 0): url for url, info in found.items()}
            chosen = choose(pattern, {file: file.size for file in listed})
            facts |= {listed[file]: found[listed[file]] for file in chosen}
        files = sorted(pool.map(_described, facts, facts.values()), key=str)
    full = [file for file in files if file.size]
    if not full:
        raise UserError(f"{key}: every file that matches {', '.join(patterns)} is empty")
    return full


def _match(key: str, pattern: str, suffixes: tuple[str, ...] | None) -> dict[str, dict[str, Any]]:
    """The properties of each file that matches a URL, without hidden files and directories."""
    try:
        system, path = _file_system(pattern)
    except (ImportError, ValueError) as error:
        raise UserError(f"{key}: {pattern}: {error}; see pip install 'hvdtrain[remote]'") from None

    def listed() -> dict[str, dict[str, Any]]:
        system.invalidate_cache()
        if "*" in path:
            return dict(system.glob(path, detail=True))
        name = urlsplit(path).path
        named = name.endswith(suffixes) if suffixes else bool(posixpath.splitext(name)[1])
        # Over HTTP, to ask whether a file is a directory would download it.
        if not named and system.isdir(path):
            return dict(system.find(path, detail=True))
        return {path: system.info(path)}

    try:
        found = attempt(pattern, listed)
    except FileNotFoundError:
        found = {}
    below = path.partition("*")[0].rpartition("/")[0] if "*" in path else path
    return {
        system.unstrip_protocol(name): info
        for name, info in found.items()
        if info.get("type") != "directory"
        and not any(part.startswith(".") for part in name[len(below) :].split("/"))
    }


def _described(url: str, info: dict[str, Any]) -> RemoteFile:
    """A file by the properties in a listing; some listings lack the size or a version."""
    if info.get("size") is None or not any(info.get(name) for name in _VERSIONS):
        system, path = _file_system(url)
        try:
            info = attempt(url, lambda: system.info(path))
        except FileNotFoundError:
            raise UserError(f"{url}: there is no such file") from None
    if info.get("size") is None:
        raise UserError(f"{url}: its server does not tell the size of the file")
    version = next((info[name] for name in _VERSIONS if info.get(name)), None)
    digest = sha256(str(version).encode()).digest()
    number = 0 if version is None else int.from_bytes(digest[:8], "little") >> 1
    return RemoteFile(url, int(info["size"]), number)


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL in this process, and the path in it.

    Raises:
        ImportError, ValueError: the package of its protocol is missing, or it is unknown.
    """
    from fsspec.core import url_to_fs

    found: tuple[Any, str] = url_to_fs(url)
    return found


def attempt(url: str, action: Callable[[], T]) -> T:
    """The result of a request; repeated, with a warning, if it fails for a reason that may pass.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: it failed every time, or for another reason.
    """
    for pause in (*_PAUSES, None):
        try:
            return action()
        except (FileNotFoundError, UserError):
            raise
        except Exception as error:  # each file system has errors of its own
            reason = " ".join(str(error).split()) or type(error).__name__
            if pause is None or isinstance(error, _PERMANENT):
                raise UserError(f"{url}: cannot be read ({reason})") from None
            logger.warning("%s: %s; trying again in %g s", url, reason, pause)
            time.sleep(pause)
    raise AssertionError


def read_url(url: str) -> bytes:
    """The content of a file.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: it cannot be read.
    """
    system, path = _file_system(url)
    return attempt(url, lambda: bytes(system.cat_file(path)))


def url_exists(url: str) -> bool:
    """Whether there is a file; False also if its server does not answer the question."""
    try:
        system, path = _file_system(url)
        return bool(attempt(url, lambda: system.exists(path)))
    except (OSError, UserError):
        return False


def beginning(file: DataFile, size: int) -> bytes:
    """The first bytes of a file; fewer if it is shorter.

    Raises:
        UserError: it cannot be read.
    """
    if isinstance(file, RemoteFile):
        return _request(file, 0, min(size, file.size))[:size]  # some servers send all of it
    try:
        with open(file, "rb") as opened:
            return opened.read(size)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def write_url(url: str, content: bytes) -> None:
    """Write a file.

    Raises:
        OSError, NotImplementedError: it cannot be written.
    """
    system, path = _file_system(url)
    system.pipe_file(path, content)


# --- byte ranges --------------------------------------------------------------


class ByteRanges:
    """Reads byte ranges of files; can be pickled, and used after a fork."""

    def __init__(self) -> None:
        self._process = os.getpid()
        # Most recently used last. Local files may be open in several processes: pread() uses no
        # common position.
        self._caches: OrderedDict[RemoteFile, Any] = OrderedDict()
        self._files: OrderedDict[Path, io.FileIO] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def read(self, file: DataFile, start: int, stop: int) -> bytes:
        """The bytes start to stop - 1.

        Raises:
            UserError: the file cannot be read, or is shorter.
        """
        if isinstance(file, RemoteFile):
            # The public interface of the caches, which file objects of fsspec call, is _fetch.
            content = bytes(self._cache(file)._fetch(start, stop))
        else:
            try:
                content = os.pread(self._file(file).fileno(), stop - start, start)
            except OSError as error:
                raise UserError(f"{file}: {error.strerror}") from None
        if len(content) != stop - start:
            raise _shorter(file, stop, start + len(content))
        return content

    def __del__(self) -> None:
        if self._process == os.getpid():
            for cache in self._caches.values():
                _close(cache)

    def _file(self, file: Path) -> io.FileIO:
        found = self._files.pop(file, None)
        if found is None:
            while len(self._files) >= _OPEN_FILES:
                self._files.popitem(last=False)
            found = io.FileIO(file)
        self._files[file] = found
        return found

    def source(self, file: DataFile) -> Path | io.RawIOBase:
        """What libraries that read files accept: a path, or an open file."""
        return RemoteReader(file, self) if isinstance(file, RemoteFile) else file

    def _cache(self, file: RemoteFile) -> Any:
        from fsspec.caching import BackgroundBlockCache

        if self._process != os.getpid():
            self._process, self._caches = os.getpid(), OrderedDict()
        found = self._caches.pop(file, None)
        if found is None:
            held = sum(map(_most_bytes, self._caches)) + _most_bytes(file)
            while self._caches and (held > _CACHE_BYTES or len(self._caches) >= _OPEN_FILES):
                oldest, cache = self._caches.popitem(last=False)
                held -= _most_bytes(oldest)
                _close(cache)
            fetch = partial(_fetch, file)
            found = BackgroundBlockCache(_BLOCK_BYTES, fetch, file.size, _BLOCKS_OF_FILE)
        self._caches[file] = found
        return found


def _most_bytes(file: RemoteFile) -> int:
    return min(file.size, _BLOCKS_OF_FILE * _BLOCK_BYTES)


def _close(cache: Any) -> None:
    """Free the blocks of a cache at once: it has a reference cycle."""
    close = getattr(cache, "close", None)  # older versions of fsspec have none
    if close is not None:
        close()


def _fetch(file: RemoteFile, start: int, stop: int) -> bytes:
    stop = min(stop, file.size)
    content = _request(file, start, stop)
    if len(content) > stop - start:
        raise UserError(f"{file}: its server does not support requests for parts of a file")
    if len(content) < stop - start:
        raise _shorter(file, stop, start + len(content))
    return content


def _request(file: RemoteFile, start: int, stop: int) -> bytes:
    """Bytes start to stop - 1; the whole file if its server does not support such requests."""
    system, path = _file_system(file.url)
    try:
        return attempt(file.url, lambda: bytes(system.cat_file(path, start=start, end=stop)))
    except FileNotFoundError:
        raise UserError(f"{file}: the file has disappeared") from None


def _shorter(file: DataFile, wanted: int, size: int) -> UserError:
    return UserError(
        f"{file}: ends after {size} bytes, but byte {wanted} is needed: the file has shrunk since "
        "it was opened"
    )


class RemoteReader(io.RawIOBase):
    """A remote file, open for reading."""

    def __init__(self, file: RemoteFile, ranges: ByteRanges) -> None:
        self._file = file
        self._ranges = ranges
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._file.size)
        if stop <= self._at:
            return 0
        content = self._ranges.read(self._file, self._at, stop)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def open_file(file: DataFile) -> BinaryIO:
    """Open a file for reading from its beginning, mostly in order."""
    source = ByteRanges().source(file)
    if isinstance(source, io.RawIOBase):
        return cast(BinaryIO, io.BufferedReader(source, 1 << 16))
    return open(source, "rb")
