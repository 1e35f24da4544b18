"""Hidden temporary copies, which the next start removes if their writer was killed.

The writer holds a lock file next to its copy until it has renamed or removed it. The kernel, or the
file server, frees the lock when the writer dies. Other hosts see that too, so no process number
has to be compared.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.files import FileLock
from hvdtrain.log import logger

# A copy without a lock (from an older version, or a file system without locks) is removed if
# nothing was written to it for this long.
STALE_SECONDS = 3600.0


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


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove the copies in a directory whose writers are dead.

    Args:
        pattern: glob of their names.
    """
    with suppress(OSError):
        for path in folder.glob(pattern):
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
