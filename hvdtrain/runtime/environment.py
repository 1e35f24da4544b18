"""What launchers put into the environment, and what has to stand there before Horovod starts.

Imports neither torch nor Horovod.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hvdtrain.runtime.machine import cores, has_rdma

# Open MPI over TCP (its BTL tcp, where no faster network is). Its way of moving large messages by
# pieces that the receiver asks for leaves the wire idle in between: at 400 Mbit/s an all-reduce of
# 32 MiB takes twice as long. Other transports do not read these.
_MPI_OVER_TCP = {
    "btl_tcp_flags": "1",  # send, neither put nor get
    "btl_tcp_eager_limit": "262144",
    "btl_tcp_max_send_size": "262144",
    # A message waits for its receiver's word, which would queue in the socket behind all that this
    # one sends: then only one of two directions is used at a time.
    "btl_tcp_sndbuf": "262144",
}
_MPI_PARAMETER_FILES = ("~/.openmpi/mca-params.conf", "/etc/openmpi/openmpi-mca-params.conf")


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


def torchrun_rank(env: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(Rank, world size) of a process that torchrun started with others; None: it did not.

    Horovod does not read torchrun's variables, so each of these processes would train alone.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, size, local_rank = (_first(env, name) for name in names)
    if rank is None or size is None or local_rank is None or size < 2 or elastic(env):
        return None
    if "TORCHELASTIC_RUN_ID" in env:
        # srun may have started torchrun itself, so Slurm's variables are not about this process.
        launched = _first(env, "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")
    elif "MASTER_ADDR" in env:
        # The last two: a launcher is there, even if its world size is not read from them.
        launched = launched_size(env) or _first(env, "MV2_COMM_WORLD_SIZE", "PMIX_RANK")
    else:
        return None
    return (rank, size) if launched is None else None


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


def process_start() -> float:
    """When this process was started, unix time; now, where the system does not tell.

    https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html (starttime, in ticks since boot).
    """
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return time.time()


def answer_seconds(ranks: int) -> int:
    """For how long a rank of so many may not answer before it counts as gone, at most.

    The one wait that grows with the ranks is for their addresses: the launcher takes about 1 ms
    for each (`make dev-bench ARGS=rendezvous`). Allowed are 10, as hosts may be busy.
    """
    return min(30, 3 + ranks // 100)


def _in_parameter_files() -> set[str]:
    """Names that the user or the administrator has set there; the environment would win."""
    found = set()
    for path in _MPI_PARAMETER_FILES:
        with suppress(OSError, UnicodeDecodeError):
            lines = Path(path).expanduser().read_text().splitlines()
            found |= {line.partition("=")[0].strip() for line in lines}
    return found


def _better_within_hosts_first(env: Mapping[str, str]) -> bool:
    """Gloo's ring sends 2 (n - 1) / n of a buffer over each host's link, where 2 (h - 1) / h do.

    MPI chooses by itself, and was faster so (docs/exchange.md). Ranks of hosts that have not
    equally many may disagree here: Horovod then takes the ring in any case.
    """
    ranks, of_host = launched_size(env) or 1, launched_local_size(env)
    gloo = "gloo" in (env.get("HOROVOD_CPU_OPERATIONS"), env.get("HOROVOD_CONTROLLER"))
    return gloo and not elastic(env) and 1 < of_host < ranks and ranks % of_host == 0


def prepare(
    env: MutableMapping[str, str] = os.environ,
    host_cores: int | None = None,
    timeout_seconds: int = 0,
    timeline: bool = False,
    hierarchical: Literal["auto"] | bool = "auto",
    process_sets: bool = False,
) -> None:
    """Sets what Horovod and MPI read when they start, and never over what the user set.

    Args:
        env: changed in place.
        host_cores: that this host's ranks share; default: those of this process.
        timeout_seconds: of a collective in elastic runs; 0 = by the number of ranks.
        timeline: Horovod's timeline will be asked for.
        hierarchical: ranks sum within their host first (`exchange.hierarchical`). auto: where it
            was measured to be faster.
        process_sets: some collectives are those of a part of the ranks.
    """
    host_cores = host_cores or cores()
    # A rank that takes no part is an error after a while, not a hang (Horovod's default: never).
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
        # that compute, load or save answer all the while: Horovod does so in a thread.
        seconds = timeout_seconds or answer_seconds(launched_size(env) or 1)
        env.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(seconds))
    if timeline and launched_size(env) is not None:
        # Must be there when Horovod starts, on every rank; the file is named later.
        env.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    if hierarchical == "auto":
        hierarchical = _better_within_hosts_first(env)
    env.setdefault("HOROVOD_HIERARCHICAL_ALLREDUCE", str(int(hierarchical)))
    if process_sets:
        env.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    if launched_local_size(env) == 1 and not has_rdma():
        # Faster than Open MPI's own over TCP. Ranks that share a core wait for each other in each
        # of its many steps; networks that move memory have collectives of theirs.
        env.setdefault("HOROVOD_MPI_RING_ALLREDUCE", "1")
    for name in _MPI_OVER_TCP.keys() - _in_parameter_files():
        env.setdefault(f"OMPI_MCA_{name}", _MPI_OVER_TCP[name])
    if launched_local_size(env) >= host_cores:
        # Open MPI spins while it waits and takes the processor from the model.
        env.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        if env.get("HOROVOD_CONTROLLER") == "gloo":
            # So does a negotiation each millisecond over sockets: 6 % of each core. What is
            # enqueued does not wait for a cycle (patch 0014), but process sets are made in cycles.
            env.setdefault("HOROVOD_CYCLE_TIME", "5" if process_sets else "20")
