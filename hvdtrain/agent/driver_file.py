"""RUN/.driver.json: where the driver of a run is, and the job's secret.

RUN/.driver-state.json: what the next driver must know of the job (elastic/job_record.py).

All hosts see the run directory, so agents find the driver whatever started them, and also a driver
that replaces another one. Whoever can write this file could start programs on all hosts, so an
agent trusts only files of its own user that no other user can write. The mode of a file that others
can read, as after `chmod -R g+rX RUN`, is restored.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.files import opened_in_place, write_atomic
from hvdtrain.runtime.queued_output import say
from hvdtrain.untrusted import checked, parse_json

NAME = ".driver.json"
STATE_NAME = ".driver-state.json"
_BYTES = 1 << 15  # constant size, written in place: other hosts see the new content at once
_MOST_ADDRESSES = 1000  # a certificate fits, too
_SECRET_BYTES = 32
_STATE_BYTES = 64 << 20  # of any job


@dataclass(frozen=True)
class DriverFile:
    """Content of the file.

    Args:
        addresses: IPv4 addresses of the driver's host, the most likely one first.
        port: where it listens for agents.
        secret: the job's secret, in hex.
        launch: identity of the launch (`launch_identity`), or "".
        exit_code: of the job, if it has ended.
        rendezvous: port of the driver for ranks; 0: not open yet.
        certificate: of the driver's TLS (PEM); "": no TLS.
        command: SHA-256 of the ranks' command (`command_digest`).
    """

    addresses: list[str]
    port: int
    secret: str = field(repr=False)
    launch: str = ""
    exit_code: int | None = None
    rendezvous: int = 0
    certificate: str = ""
    command: str = ""

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.secret)


def new_secret() -> str:
    return secrets.token_hex(_SECRET_BYTES)


def command_digest(argv: Sequence[str]) -> str:
    """Return what distinguishes the command of the ranks from others, in hex."""
    return hashlib.sha256(json.dumps(list(argv)).encode()).hexdigest()


def write(run: Path, content: DriverFile) -> None:
    """Replace the file; only the owner of the run directory's driver token may call this.

    Raises:
        UserError: the file belongs to another user.
        OSError: it cannot be written.
    """
    content = replace(content, addresses=content.addresses[:_MOST_ADDRESSES])
    text = json.dumps(asdict(content)).ljust(_BYTES - 1) + "\n"
    with opened_in_place(run / NAME, 0o600) as handle:
        if os.fstat(handle).st_uid != os.geteuid():
            raise UserError(f"{run / NAME} belongs to another user; choose another --run.id")
        os.fchmod(handle, 0o600)
        os.pwrite(handle, text.encode(), 0)


def read(run: Path) -> DriverFile | None:
    """Return the content; None if there is no file, or it is being written.

    Raises:
        UserError: the file must not be trusted.
        OSError: it cannot be read.
    """
    content = _read_private(run / NAME, _BYTES)
    try:
        driver = checked(DriverFile, content)
        bytes.fromhex(driver.secret)
        return driver
    except (ValueError, TypeError, AttributeError):
        return None


def write_state(run: Path, state: Mapping[str, Any]) -> None:
    """Replace the state of the job; only the owner of the driver token may call this.

    Raises:
        OSError: it cannot be written; the old state is still there.
    """
    content = json.dumps(state, separators=(",", ":")).encode()
    write_atomic(run / STATE_NAME, content, mode=0o600)


def remove_state(run: Path) -> None:
    """Remove the state: no other driver can replace this one."""
    (run / STATE_NAME).unlink(missing_ok=True)


def read_state(run: Path) -> dict[str, Any] | None:
    """Return the state of the job; None if there is none.

    Raises:
        UserError: the file must not be trusted.
        OSError: it cannot be read.
    """
    found = _read_private(run / STATE_NAME, _STATE_BYTES)
    return found if isinstance(found, dict) else None


def _read_private(path: Path, limit: int) -> Any:
    """Return the JSON in a file that only this user can write; None: no file, or no JSON."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise UserError(f"{path} does not belong to this user: remove it")
        if stat.S_IMODE(found.st_mode) & 0o022:
            raise UserError(f"{path} can be written by other users: its mode must be 0600")
        if stat.S_IMODE(found.st_mode) & 0o077:
            with suppress(OSError):
                os.fchmod(handle, 0o600)
            if stat.S_IMODE(os.fstat(handle).st_mode) & 0o077:
                raise UserError(
                    f"{path} is accessible to other users: its mode must be 0600, but it cannot be "
                    "set"
                )
            _report_readable(path)
        with suppress(ValueError):
            return parse_json(file.read(limit))
    return None


@cache
def _report_readable(path: Path) -> None:
    say(
        f"warning: {path} could be read by other users; its mode is set to 0600 again. It contains "
        "the secret of this job: if they are not trusted, end the run and start it again"
    )


def launch_identity(env: Mapping[str, str] = os.environ) -> str:
    """Return what distinguishes this launch from all others of the run; "" if it is not known.

    An agent that starts late recognizes by it that the job has already ended.
    """
    if "SLURM_STEP_ID" in env:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "slurm-" + ".".join(env.get(name, "0") for name in names)
    return env.get("PMIX_NAMESPACE", "")
