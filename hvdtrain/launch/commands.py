"""Command lines of the launchers, as pure functions that return an argv."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from hvdtrain.launch import mpi

# Environment variables passed to ranks on other hosts; horovodrun passes all of them.
_EXPORTED = ("HVDTRAIN_", "HOROVOD_", "NCCL_", "OMP_", "CUDA_")
# Variables that Open MPI sets in a process that has started MPI without a launcher, such as
# a notebook's kernel after `import mpi4py.MPI`.
_OF_A_SINGLETON = (
    *("OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_orte_launch", "OMPI_MCA_orte_ess_num_procs"),
    *("OMPI_MCA_orte_precondition_transports", "OMPI_APP_CTX_NUM_PROCS", "ORTE_SCHIZO_DETECTION"),
)


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
    # The launcher of this environment, regardless of PATH.
    launcher = str(Path(sys.executable).with_name("horovodrun"))
    where = ["-H", hosts] if hosts else []
    return [launcher, f"--{controller}", "-np", str(np), *where, *command]


def mpirun(
    np: int,
    command: Sequence[str],
    hosts: str | None = None,
    exported: Sequence[str] = (),
) -> list[str]:
    """Return the argv that starts `command` on `np` ranks with the mpirun on PATH.

    `hosts` is `name:slots,name:slots` (default: this machine); `exported` are names of environment
    variables for ranks on other hosts. Raises UserError if mpirun is missing or unknown.
    """
    return mpi.argv(mpi.of_launcher(), np, command, hosts, exported)


def mpirun_with_failure_detection(
    np: int, command: Sequence[str], hosts: str, env: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the argv of an `mpirun` that ends, with its ranks, seconds after a host or link fails.

    `env` is mpirun's environment: the variables that training reads are passed to all hosts.
    Raises UserError if mpirun is missing or unknown.
    """
    exported = [name for name in sorted(env) if name.startswith(_EXPORTED)]
    return mpi.argv(mpi.of_launcher(), np, command, hosts, exported, watched=True)


def elastic_horovodrun(
    np: int, min_np: int, max_np: int | None, discovery: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the argv of an elastic job: `command` on `min_np` to `max_np` ranks, first `np`.

    `max_np` None: as many ranks as the hosts have slots.
    `discovery` is the argv of a program that prints the hosts as `name:slots` lines.
    """
    limits = ["--min-np", str(min_np)]
    limits += [] if max_np is None else ["--max-np", str(max_np)]
    script = ["--host-discovery-script", shlex.join(discovery)]
    return horovodrun(np, [*limits, *script, *command])


def forget_singleton(env: MutableMapping[str, str]) -> None:
    """Remove variables that a parent which is itself an MPI process has left in `env`.

    With them every mpirun exits at once with code 1 and without a message.
    """
    if env.get("OMPI_MCA_ess") == "singleton":
        for name in [n for n in env if n in _OF_A_SINGLETON or n.startswith("PMIX_")]:
            del env[name]
