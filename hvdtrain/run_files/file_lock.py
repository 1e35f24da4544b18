"""flock on a file, if the file system supports it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


class FileLock:
    """An exclusive lock, held until it is closed or the process ends.

    Attributes:
        held: whether this process has the lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.held = False

    def open(self) -> None:
        """Create the file; a second call has no effect.

        Raises:
            OSError: it cannot be created.
        """
        if self._descriptor is None:
            self._descriptor = os.open(self._path, _OPEN, 0o666)

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
