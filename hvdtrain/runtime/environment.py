"""Environment variables that launchers set, and those that must be set before Horovod starts.

Imports neither torch nor Horovod.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from hvdtrain.errors import LauncherError, UserError
from hvdtrain.runtime.machine import cores, has_rdma

# Open MPI over TCP (its BTL tcp, used without a faster network). By default the receiver requests
# large messages in pieces, and the network is idle in between: at 400 Mbit/s an all-reduce of
# 32 MiB takes twice as long. Other transports do not read these.
_MPI_OVER_TCP = {
    "btl_tcp_flags": "1",  # send, neither put nor get
    "btl_tcp_eager_limit": "262144",
    "btl_tcp_max_send_size": "262144",
    # A message waits for its receiver's reply, which would queue in the socket behind everything
    # that the receiver sends: only one of the two directions would be used at a time.
    "btl_tcp_sndbuf": "262144",
}
# MPI spins while it waits, and takes CPU time from the model of ranks on the same core. Open MPI
# and Intel MPI yield only if they are asked to, MPICH after 1,000 polls. 4 ranks on 2 cores: 0.3 s
# per step with these, 0.5 to 1.1 s if Intel MPI does not yield, 3 to 10 % more if MPICH does so
# after 1,000 polls.
YIELDING = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "I_MPI_THREAD_YIELD": "3",
}
_MPI_PARAMETER_FILES = ("~/.openmpi/mca-params.conf", "/etc/openmpi/openmpi-mca-params.conf")


# Variables of launchers, the innermost launcher first: mpirun may be started by a Slurm step.
_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = (
    "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
)  # fmt: skip
_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID",
)  # fmt: skip
_LOCAL_SIZES = (
    "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
_OF_TORCH = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def _first(env: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if env.get(name, "").isdigit():
            return int(env[name])
    return None


class TorchRanks(NamedTuple):
    """Position of a process that torchrun started."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def torch_ranks(env: Mapping[str, str] = os.environ) -> TorchRanks | None:
    """Return this process's position from the variables of torch's env:// rendezvous.

    torchrun sets them, and other launchers of torch. None: they are not set or not complete, or
    Horovod knows its ranks from another launcher.
    """
    if "HOROVOD_SIZE" in env or elastic(env):
        return None
    # srun or mpirun may have started torchrun itself: their variables are not about this process.
    if "TORCHELASTIC_RUN_ID" not in env and _first(env, *_SIZES, "PMIX_RANK") is not None:
        return None
    rank, size = _first(env, "RANK"), _first(env, "WORLD_SIZE")
    local = _first(env, "LOCAL_RANK"), _first(env, "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    if local == (None, None):
        local = 0, 1  # PyTorchJob of Kubernetes: one process in each pod
    known = (rank, size, *local, env.get("MASTER_ADDR") or None, _first(env, "MASTER_PORT"))
    if None in known or (size == 1 and "TORCHELASTIC_RUN_ID" not in env):
        return None
    return TorchRanks(*known[:4])  # type: ignore[arg-type]


def torchrun_restarts(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun starts this process again after a failure (`--max-restarts`)."""
    return bool(_first(env, "TORCHELASTIC_MAX_RESTARTS"))


def launched_rank(env: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank from its launcher, before Horovod starts; 0 without a launcher."""
    torch = torch_ranks(env)
    # A launcher that cannot be served may have set RANK, see `refuse_to_train_alone`.
    of_torch = ["RANK"] if (_first(env, "WORLD_SIZE") or 0) > 1 else []
    return torch.rank if torch else _first(env, "HOROVOD_RANK", *_RANKS, *of_torch) or 0


def launched_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that the launcher started, or None without a launcher.

    SLURM_NTASKS does not count: sbatch sets it for the script too, which is one process.
    """
    torch = torch_ranks(env)
    return torch.size if torch else _first(env, "HOROVOD_SIZE", *_SIZES)


def launched(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a task of a launcher, also of pbsdsh, which does not count them."""
    return launched_size(env) is not None or "PBS_NODENUM" in env


def refuse_to_train_alone(env: Mapping[str, str] = os.environ) -> None:
    """Check that this process is the only one if its launcher cannot be served.

    Raises:
        LauncherError: it is one of several, each of which would train alone.
    """
    if launched_size(env) is not None:
        return  # Horovod will find the other ranks, or `runtime.init.initialize` reports it
    for name, least in (("WORLD_SIZE", 2), ("PMIX_RANK", 1)):
        value = _first(env, name)
        if value is not None and value >= least:
            raise LauncherError(
                f"{name}={value} in the environment: this is one of several processes, each of "
                "which would train alone, as their launcher does not set what Horovod needs; start "
                "them with horovodrun, mpirun, torchrun or hvdtrain launch, or set "
                "--runtime.standalone true for independent runs"
            )


def forget_launcher(env: MutableMapping[str, str] = os.environ) -> None:
    """Remove the variables of launchers from `env`: this process trains alone.

    Raises:
        UserError: horovodrun has started this process.
    """
    if "HOROVOD_SIZE" in env or elastic(env):
        raise UserError(
            "runtime.standalone: horovodrun starts the ranks of one run; start independent "
            "processes with another launcher, or without one"
        )
    # PMI_FD: an error must not end the other processes, see pmi.abort_job.
    ours = {*_RANKS, *_SIZES, *_LOCAL_RANKS, *_LOCAL_SIZES, *_OF_TORCH, "PMI_FD"}
    for name in [n for n in env if n in ours or n.startswith("TORCHELASTIC_")]:
        del env[name]


def elastic(env: Mapping[str, str] = os.environ) -> bool:
    """Whether an elastic launcher started this process."""
    return env.get("HOROVOD_ELASTIC") == "1"


def launched_local_size(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks on this host from the launcher; 1 if it does not set it."""
    torch = torch_ranks(env)
    return torch.local_size if torch else _first(env, "HOROVOD_LOCAL_SIZE", *_LOCAL_SIZES) or 1


def mpi_local_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks on this host from mpirun; None if it does not set it."""
    return _first(env, *(name for name in _LOCAL_SIZES if not name.startswith("SLURM_")))


def launched_local_rank(env: Mapping[str, str] = os.environ) -> int:
    """Return this process's local rank from its launcher; 0 without a launcher.

    In an elastic run it stays the same, while Horovod's local rank may change.
    """
    torch = torch_ranks(env)
    return torch.local_rank if torch else _first(env, "HOROVOD_LOCAL_RANK", *_LOCAL_RANKS) or 0


def process_start() -> float:
    """Return the unix time at which this process was started; now, if the system does not tell.

    https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html (starttime, in ticks since boot).
    """
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return time.time()


def answer_seconds(ranks: int) -> int:
    """Return the longest time in seconds for which a rank may not respond before it counts as gone.

    Only the wait for the ranks' addresses grows with the number of ranks: the launcher takes about
    1 ms for each (`make dev-bench ARGS=rendezvous`). 10 ms are allowed, as hosts may be busy.
    """
    return min(30, 3 + ranks // 100)


def _in_parameter_files() -> set[str]:
    """Return parameters set in MPI's parameter files, which the environment would override."""
    found = set()
    for path in _MPI_PARAMETER_FILES:
        with suppress(OSError, UnicodeDecodeError):
            lines = Path(path).expanduser().read_text().splitlines()
            found |= {line.partition("=")[0].strip() for line in lines}
    return found


def _better_within_hosts_first(env: Mapping[str, str]) -> bool:
    """Whether a hierarchical all-reduce is faster.

    Over each host's link, Gloo's ring over n ranks sends 2 (n - 1) / n of a buffer, but
    2 (h - 1) / h suffice for h hosts. MPI chooses its own algorithm, by the network. If hosts have
    different numbers of ranks, ranks may disagree here: Horovod then uses the ring anyway.
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
    """Set variables that Horovod and MPI read when they start; never override the user's values.

    Args:
        env: changed in place.
        host_cores: cores that this host's ranks share; default: the cores of this process.
        timeout_seconds: timeout in seconds of a collective in elastic runs; 0 = by the number of
            ranks.
        timeline: Horovod's timeline will be used.
        hierarchical: ranks sum within their host first (`exchange.hierarchical`). auto: if it was
            measured to be faster.
        process_sets: some collectives involve only some ranks.

    Raises:
        LauncherError: see `refuse_to_train_alone`.
    """
    refuse_to_train_alone(env)
    host_cores = host_cores or cores()
    # A rank that takes no part causes an error after a while, not a hang (Horovod's default).
    env.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "900")
    # Gradients are sent in fixed buckets. By default Horovod fuses whatever buckets are ready,
    # and sums would be rounded in a different order from run to run.
    env.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
    if launched_size(env) is None or torch_ranks(env) is not None:
        # A single process: no MPI, which would start a daemon of its own. torchrun starts no MPI.
        env.setdefault("HOROVOD_CONTROLLER", "gloo")
        env.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")
    if launched_size(env) is None:
        # Nothing is negotiated; a cycle each millisecond (the default) costs 3 % of a core.
        env.setdefault("HOROVOD_CYCLE_TIME", "20")
    if elastic(env):
        # The death of a rank is detected at once; this timeout is for a stopped or disconnected
        # rank. Ranks that compute, load or save respond meanwhile: Horovod has its own thread.
        seconds = timeout_seconds or answer_seconds(launched_size(env) or 1)
        env.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(seconds))
    if timeline and launched_size(env) is not None:
        # Must be set when Horovod starts, on every rank; the file is named later.
        env.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    if hierarchical == "auto":
        hierarchical = _better_within_hosts_first(env)
    env.setdefault("HOROVOD_HIERARCHICAL_ALLREDUCE", str(int(hierarchical)))
    if process_sets:
        env.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    if launched_local_size(env) == 1 and not has_rdma():
        # Faster than Open MPI's own over TCP. Not for ranks that share a core, which would wait for
        # each other in each of its many steps; RDMA networks have their own collectives.
        env.setdefault("HOROVOD_MPI_RING_ALLREDUCE", "1")
    for name in _MPI_OVER_TCP.keys() - _in_parameter_files():
        env.setdefault(f"OMPI_MCA_{name}", _MPI_OVER_TCP[name])
    if launched_local_size(env) >= host_cores:
        for name, value in YIELDING.items():
            env.setdefault(name, value)
        if env.get("HOROVOD_CONTROLLER") == "gloo":
            # So does a negotiation each millisecond over sockets: 6 % of each core. Enqueued
            # tensors do not wait for a cycle (patch 0014), but process sets are made in cycles.
            env.setdefault("HOROVOD_CYCLE_TIME", "5" if process_sets else "20")
