"""RUN/.driver.json: where the driver of a run is, and the job's secret.

All hosts see the run directory, so agents find the driver whatever started them, and also a driver
that replaces another one. Whoever can write this file could start programs on all hosts, so an
agent trusts only a file of its own user that no other user can read or write.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.untrusted import checked, parse_json

NAME = ".driver.json"
_BYTES = 8192  # constant size, written in place: other hosts see the new content at once
_SECRET_BYTES = 32


@dataclass(frozen=True)
class DriverFile:
    """Content of the file.

    Args:
        addresses: IPv4 addresses of the driver's host, the most likely one first.
        port: where it listens for agents.
        secret: the job's secret, in hex.
        launch: identity of the launch (`launch_identity`), or "".
        exit_code: of the job, if it has ended.
    """

    addresses: list[str]
    port: int
    secret: str = field(repr=False)
    launch: str = ""
    exit_code: int | None = None

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.secret)


def new_secret() -> str:
    return secrets.token_hex(_SECRET_BYTES)


def write(run: Path, content: DriverFile) -> None:
    """Replace the file; only the owner of the run directory's driver token may call this.

    Raises:
        UserError: the file belongs to another user.
        OSError: it cannot be written.
    """
    text = json.dumps(asdict(content)).ljust(_BYTES - 1) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(run / NAME, flags, 0o600)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise UserError(f"{run / NAME} belongs to another user; choose another --run.id")
        os.fchmod(handle, 0o600)
        os.pwrite(handle, text.encode(), 0)
    finally:
        os.close(handle)


def read(run: Path) -> DriverFile | None:
    """Return the content; None if there is no file, or it is being written.

    Raises:
        UserError: the file must not be trusted.
        OSError: it cannot be read.
    """
    path = run / NAME
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise UserError(f"{path} does not belong to this user: remove it")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise UserError(f"{path} is accessible to other users: its mode must be 0600")
        content = parse_json(os.pread(handle, _BYTES, 0))
        driver = checked(DriverFile, content)
        bytes.fromhex(driver.secret)
        return driver
    except (ValueError, TypeError, AttributeError):
        return None
    finally:
        os.close(handle)


def launch_identity(env: Mapping[str, str] = os.environ) -> str:
    """Return what distinguishes this launch from all others of the run; "" if it is not known.

    An agent that starts late recognizes by it that the job has already ended.
    """
    if "SLURM_STEP_ID" in env:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "slurm-" + ".".join(env.get(name, "0") for name in names)
    return env.get("PMIX_NAMESPACE", "")
