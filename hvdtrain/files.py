"""Files that are complete or absent, or written in place, and locks on files."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = 0
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


def sync_directory(directory: Path) -> None:
    """Make names created or renamed in `directory` survive a power loss."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes, shared: bool = False, mode: int = 0o666) -> None:
    """Replace a file: a reader sees the old content or the new content, never a mixture.

    Neither a link in place of `path` nor a temporary name that was created in advance redirects
    the content: a new file gets a random name in the opened directory, and is renamed there.

    Args:
        shared: other users may write to the directory. It must not be a link, and must belong to
            this user or to root, or have the sticky bit (like /tmp).
        mode: permissions of the new file, before the umask.

    Raises:
        OSError: the old content is still there.
    """
    with opened_directory(path.parent, follow=not shared) as directory:
        temporary = f".{path.name}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(temporary, flags, mode, dir_fd=directory)
        try:
            with open(handle, "wb") as file:
                if shared:
                    # A file server may map this user to another: the new file's owner is known.
                    _check_owner(os.fstat(directory), os.fstat(handle).st_uid, path.parent)
                file.write(content)
                file.flush()
                os.fsync(handle)
            os.replace(temporary, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
        os.fsync(directory)


def _check_owner(directory: os.stat_result, user: int, path: Path) -> None:
    if directory.st_uid in (user, _ROOT) or directory.st_mode & stat.S_ISVTX:
        return
    reason = f"the directory belongs to another user (uid {directory.st_uid})"
    raise PermissionError(errno.EPERM, reason, str(path))


@contextmanager
def opened_in_place(path: Path, mode: int | None = None) -> Iterator[int]:
    """Context in which a file of constant size is open, to be written in place.

    Reopened for each write: other hosts see the content of closed files.

    Args:
        mode: permissions of a new file, before the umask; None: the file must exist.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags if mode is None else flags | os.O_CREAT, mode or 0)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def opened_directory(path: Path, follow: bool = True) -> Iterator[int]:
    """Context with the descriptor of a directory, which is unaffected if its name is replaced.

    Args:
        follow: `path` may be a link.

    Raises:
        OSError: it is not a directory, or cannot be opened.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        handle = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except NotADirectoryError as error:
        if not follow:
            error.strerror = "the directory is a link, or not a directory"
        raise
    try:
        yield handle
    finally:
        os.close(handle)


def is_open_at(descriptor: int, path: Path) -> bool:
    """Whether `path` still names an open file, which may have been removed, moved or replaced.

    Raises:
        OSError: it is unknown.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError as error:
        # ESTALE: another host has removed the file from a network file system.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return False
        raise


class FileLock:
    """An exclusive lock (flock) on a file, held until it is closed or the process ends.

    Attributes:
        held: whether this process has the lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.held = False

    def open(self) -> None:
        """Create the file, also if it was removed since the last call.

        Raises:
            OSError: it cannot be created.
        """
        if self._descriptor is not None and not is_open_at(self._descriptor, self._path):
            os.close(self._descriptor)
            self._descriptor, self.held = None, False
        if self._descriptor is None:
            self._descriptor = os.open(self._path, _LOCK_FLAGS, 0o666)

    def attempt(self) -> bool:
        """Take the lock if it is free.

        Returns:
            Whether the lock's state is known; False if the file system has no locks.

        Raises:
            OSError: the lock could not be queried.
        """
        if self._descriptor is None or self.held:
            return self.held
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.held = True
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
