"""What launchers put into the environment, and what has to stand there before Horovod starts.

Imports neither torch nor Horovod.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping


def _first(env: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if env.get(name, "").isdigit():
            return int(env[name])
    return None


def launched_rank(env: Mapping[str, str] = os.environ) -> int:
    """This process's rank as its launcher says, before Horovod is up; 0 without a launcher."""
    return (
        _first(env, "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
        or 0
    )


def launched_size(env: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks the launcher started, or None where no launcher did.

    SLURM_NTASKS does not count: sbatch sets it for the script too, which is one process.
    """
    return _first(env, "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def elastic(env: Mapping[str, str] = os.environ) -> bool:
    """Whether an elastic launcher started this process."""
    return env.get("HOROVOD_ELASTIC") == "1"


def launched_local_size(env: Mapping[str, str] = os.environ) -> int:
    """Ranks on this host as the launcher says; 1 where it does not."""
    return (
        _first(
            env, "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
            "SLURM_NTASKS_PER_NODE",
        )
        or 1
    )  # fmt: skip


def launched_local_rank(env: Mapping[str, str] = os.environ) -> int:
    """This process's place on its host as its launcher says; 0 without a launcher.

    In an elastic run it stays while Horovod's local rank may change.
    """
    return (
        _first(
            env, "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
            "SLURM_LOCALID",
        )
        or 0
    )  # fmt: skip


def prepare(
    env: MutableMapping[str, str] = os.environ,
    cores: int | None = None,
    timeout_seconds: int = 0,
    timeline: bool = False,
) -> None:
    """Sets what Horovod and MPI read when they start, and never over what the user set.

    Args:
        env: changed in place.
        cores: processors that this host's ranks share; default: those of this process.
        timeout_seconds: of a collective in elastic runs; 0 = by the number of ranks.
        timeline: Horovod's timeline will be asked for.
    """
    cores = cores or len(os.sched_getaffinity(0))
    # A rank that takes no part is an error after a while, not a hang (Horovod's default: never);
    # long enough for rank 0 to save a large checkpoint to a slow disk.
    env.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "900")
    # Gradients travel in fixed buckets. Without this Horovod would fuse whatever buckets
    # happen to be ready, and sums would be rounded in another order from run to run.
    env.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
    if launched_size(env) is None:
        # Alone: no MPI, which would start a daemon of its own for one process.
        env.setdefault("HOROVOD_CONTROLLER", "gloo")
        env.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")
        # There is nothing to negotiate; each millisecond (the default) costs 3 % of a core.
        env.setdefault("HOROVOD_CYCLE_TIME", "20")
    if elastic(env):
        # A rank that died is noticed at once; this is for one that is stopped or cut off. Ranks
        # that compute, load or save answer all the while: Horovod does so in a thread. The
        # one wait that grows with the ranks is for their addresses: the launcher takes about
        # 1 ms for each (`hvdtrain bench rendezvous`). Allowed are 10, as hosts may be busy.
        seconds = timeout_seconds or min(30, 3 + (launched_size(env) or 1) // 100)
        env.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(seconds))
    if timeline and launched_size(env) is not None:
        # Must be there when Horovod starts, on every rank; the file is named later.
        env.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    if launched_local_size(env) >= cores:
        # Open MPI spins while it waits and takes the processor from the model.
        env.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        if env.get("HOROVOD_CONTROLLER") == "gloo":
            # So does a negotiation each millisecond over sockets: 6 % of each core.
            env.setdefault("HOROVOD_CYCLE_TIME", "5")
