"""On a host: the directory of runs, its free space and its locks."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.files import FileLock

_TRIAL_BYTES = 1 << 20
# Held until the agent ends; meanwhile another host tries to take the lock.
_held: list[FileLock] = []


def folder(path: str) -> dict[str, Any]:
    """Check free space, locks and a trial write in a directory; report failures as error messages.

    A missing directory is created, as a run would do, and removed again.

    Returns:
        free: bytes; inodes: free ones; failed: "" if 1 MiB could be written; locks: flock works.
    """
    root = Path(path)
    made: list[Path] = []
    trial = root / f".doctor-{os.uname().nodename}-{secrets.token_hex(8)}"
    found: dict[str, Any] = {"free": 0, "inodes": 0, "failed": "", "locks": True}
    try:
        made = missing(root)
        root.mkdir(parents=True, exist_ok=True)
        state = os.statvfs(root)
        found |= {"free": state.f_bavail * state.f_frsize, "inodes": state.f_favail}
        with open(trial, "xb") as file:  # do not follow a link in its place
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
        lock = FileLock(trial)
        lock.open()
        found["locks"] = lock.attempt()
        lock.close()
    except OSError as error:
        found["failed"] = error.strerror or str(error)
    finally:
        with suppress(OSError):
            trial.unlink(missing_ok=True)
        for one in made:
            with suppress(OSError):
                one.rmdir()
    return found


def missing(root: Path) -> list[Path]:
    """The missing directories among `root` and its parents, innermost first.

    Raises:
        OSError: a parent directory cannot be searched.
    """
    return [one for one in (root, *root.parents) if not one.exists()]


def hold(path: str) -> bool:
    """Take a lock on a file in a directory that hosts may share; return whether it worked."""
    lock = FileLock(Path(path))
    try:
        lock.open()
        lock.attempt()
    except OSError:
        return False
    _held.append(lock)
    return lock.held


def attempt(path: str) -> str:
    """Try a lock that another host holds: "absent" (no such file), "refused" or "taken"."""
    if not os.path.exists(path):  # or not visible
        return "absent"
    lock = FileLock(Path(path))
    try:
        lock.open()
        lock.attempt()
        return "taken" if lock.held else "refused"
    except OSError:
        return "absent"
    finally:
        lock.close()
