"""Check that hosts share run.root and its locks: one host takes a lock, the others try to."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.doctor.finding import WARNING, Finding
from hvdtrain.doctor.host_files import missing
from hvdtrain.doctor.session import Session, SilentError, together

_SECONDS = 10.0


def check_locks(sessions: Sequence[Session], root: str) -> list[Finding]:
    """Check that the other hosts see a lock that the first host takes in run.root.

    Report nothing if the lock cannot be taken or the directory cannot be created: each host is
    checked for that separately.
    """
    folder = Path(root).absolute()
    path = folder / f".doctor-lock-{socket.gethostname()}-{os.getpid()}"
    made: list[Path] = []
    try:
        made = missing(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not sessions[0].ask("hold", _SECONDS, path=str(path)):
            return []
        seen = together(sessions[1:], lambda one: one.ask("attempt", _SECONDS, path=str(path)))
    except (OSError, SilentError):
        return []
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            for one in made:
                one.rmdir()  # not on NFS, which keeps the file as long as the agent holds it
    return [
        _finding(host, state, str(folder)) for host, state in seen.items() if state != "refused"
    ]


def _finding(host: str, state: str, folder: str) -> Finding:
    if state == "absent":
        return Finding(
            "shared folder",
            host,
            f"{folder} is another folder there",
            "checkpoints lie on the host of rank 0 alone: a run that moves begins anew",
            f"mount a file system that all hosts share, and name it with --run.root; {folder} "
            f"on {host}: findmnt -T {folder}",
            WARNING,
        )
    return Finding(
        "locks",
        host,
        f"a lock on a file in {folder} does not hold between the hosts",
        "that one process alone writes a run is then known by its token, 12 s later",
        "mount it with locks that the server keeps (NFS: without nolock and local_lock)",
        WARNING,
    )
