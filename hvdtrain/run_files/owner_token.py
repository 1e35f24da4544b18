"""Content of the file by which a process owns a run; ownership.py describes the protocol."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.files import opened_in_place
from hvdtrain.untrusted import checked, read_json

_BYTES = 512  # constant size, written in place: works on a full disk, too
LAUNCH = ".launch."  # prefix of the token of the process that supervises the run


@dataclass(frozen=True)
class Claim:
    """Identity with which a process claims a run.

    Args:
        job: common to all processes of an elastic job, and unique to the job.
        generation: generation of the ranks in that job; a later generation takes precedence.
    """

    job: int
    generation: int = 0

    @classmethod
    def of_this_process(cls) -> Claim:
        return cls(secrets.randbits(62))

    def __str__(self) -> str:
        return f"{self.job:x}.{self.generation}"


@dataclass(frozen=True)
class Token:
    """Content of the token file.

    Args:
        owner: unique to a process.
        boot: boot ID of the owner's kernel.
        locked: the owner has the lock, too.
        beats: heartbeat count; increases while the owner is alive.
        ended: the owner has released the run. The token remains, for a previous owner that was
            stopped.
    """

    owner: str
    job: int
    generation: int
    host: str
    pid: int
    boot: str
    locked: bool
    beats: int = 0
    ended: bool = False


def of_launch(run: Path) -> Path:
    """Return the path of the token of the process that supervises a run."""
    return run / f"{LAUNCH}owner"


def moved(before: Token | None, token: Token | None) -> bool:
    """Whether the owner is alive: its heartbeat count has changed between two reads."""
    if before is None or token is None or token.ended:
        return False
    return before.owner == token.owner and before.beats != token.beats


def read(path: Path) -> Token | None:
    """The token; None if there is none, or if it is incomplete."""
    try:
        return checked(Token, read_json(path))
    except (FileNotFoundError, ValueError):
        return None


def write(path: Path, token: Token) -> None:
    """Replace the token in place.

    Raises:
        OSError: it cannot be written.
    """
    content = json.dumps(asdict(token)).ljust(_BYTES - 1) + "\n"
    with opened_in_place(path, 0o666) as file:
        os.pwrite(file, content.encode(), 0)


def obstacle(path: Path) -> str:
    """Return why a token cannot be written; "" if it can, or if there is none."""
    try:
        with opened_in_place(path) as file:
            os.utime(file)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def now() -> float:
    """Time in seconds, including time in which the host was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot() -> str:
    """Boot ID of the running kernel; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def who(token: Token) -> str:
    return f"process {token.pid} on {token.host}"
