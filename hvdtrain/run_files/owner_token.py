"""What the file says by which a process owns a run; ownership.py says what that means."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.untrusted import checked, read_json

_BYTES = 512  # always as many, in place: also a full disk takes that


@dataclass(frozen=True)
class Claim:
    """What a process has to say for itself.

    Args:
        job: all processes of an elastic job have the same, and no other job's.
        generation: of the ranks in that job; of two, the later one counts.
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
    """What the file says.

    Args:
        owner: unlike any other process's.
        boot: of the owner's kernel.
        locked: the owner has the lock too.
        beats: rises while the owner lives.
        ended: it gave the run back. The token stays, for an owner before it that was stopped.
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


def moved(before: Token | None, token: Token | None) -> bool:
    """Whether an owner lives: it has counted on between two looks."""
    if before is None or token is None or token.ended:
        return False
    return before.owner == token.owner and before.beats != token.beats


def read(path: Path) -> Token | None:
    """None: there is no token, or none that is whole."""
    try:
        return checked(Token, read_json(path))
    except (FileNotFoundError, ValueError):
        return None


def write(path: Path, token: Token) -> None:
    """Replaces the token in place.

    Raises:
        OSError: it cannot be written.
    """
    content = json.dumps(asdict(token)).ljust(_BYTES - 1) + "\n"
    # Opened anew each time: what is closed can be seen from other hosts.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags, 0o666)
    try:
        os.pwrite(file, content.encode(), 0)
    finally:
        os.close(file)


def boot() -> str:
    """Of the kernel that runs now."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def who(token: Token) -> str:
    return f"process {token.pid} on {token.host}"
