"""Command lines of the launchers: pure functions from a plan to an argv."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def horovodrun(
    np: int,
    command: Sequence[str],
    hosts: str | None = None,
    controller: str = "gloo",
) -> list[str]:
    """Return the argv that starts `command` on `np` ranks with horovodrun.

    `hosts` is `name:slots,name:slots` (default: this machine); `controller` is
    `gloo` or `mpi`. Raises ValueError for another controller.
    """
    if controller not in ("gloo", "mpi"):
        raise ValueError(f"controller is 'gloo' or 'mpi', not {controller!r}")
    # The launcher of this very environment, whatever PATH says.
    launcher = str(Path(sys.executable).with_name("horovodrun"))
    where = ["-H", hosts] if hosts else []
    return [launcher, f"--{controller}", "-np", str(np), *where, *command]


def mpirun(
    np: int,
    command: Sequence[str],
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Return the argv that starts `command` on `np` ranks with Open MPI's mpirun.

    `hosts` is `name:slots,name:slots`, `hostfile` a file of `name slots=n` lines;
    at most one of them may be given, else ValueError.
    """
    if hosts and hostfile:
        raise ValueError("give hosts or hostfile, not both")
    argv = ["mpirun", "-np", str(np)]
    if os.geteuid() == 0:
        argv.append("--allow-run-as-root")  # Open MPI refuses root without it: containers
    if hosts:
        argv += ["-H", hosts]
    if hostfile:
        argv += ["--hostfile", os.fspath(hostfile)]
    if not (hosts or hostfile):
        # Open MPI counts cores, not hardware threads, and stops if ranks are more.
        argv.append("--oversubscribe")
    # Horovod's background thread would share the one core a rank is bound to.
    return [*argv, "--bind-to", "none", "--map-by", "slot", *command]
