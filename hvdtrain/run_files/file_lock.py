"""flock on a file, where the file system has it."""

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
        held: this process has it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.held = False

    def open(self) -> None:
        """Makes the file; a second call does nothing.

        Raises:
            OSError: it cannot be made.
        """
        if self._descriptor is None:
            self._descriptor = os.open(self._path, _OPEN, 0o666)

    def attempt(self) -> bool:
        """Takes the lock if it is free.

        Returns:
            Whether it is known who has it: False where the file system has none.

        Raises:
            OSError: the file system cannot say.
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
        """Gives it up."""
        if self._descriptor is not None:
            os.close(self._descriptor)
