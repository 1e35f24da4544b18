"""Start and end of Horovod for a generation, its features, and its timeline."""

from __future__ import annotations

import ctypes
import os
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from hvdtrain.errors import LauncherError
from hvdtrain.runtime import environment, late_ranks, machine, pmi, torchrun
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.horovod import HorovodInternalError, hvd
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.work import HOROVOD, threads_named


def initialize(
    threads: int = 0, stop: Callable[[], bool] = lambda: False, gpu: str = ""
) -> Topology:
    """Start Horovod and return the topology; call `environment.prepare` first.

    Args:
        threads: number of threads for this rank's computations; 0 = by cores and ranks.
        stop: whether this process was asked to stop; it then waits no longer for other ranks.
        gpu: identity of this rank's GPU, see runtime.device.gpu_of, if it is known.

    Raises:
        LauncherError: Horovod does not fit the launcher.
        UserError: ranks that horovodrun or torchrun started do not find each other.
        RankLostError: a rank died meanwhile.
    """
    if not hvd.is_initialized():
        late_ranks.wait(stop=stop)
    torchrun.join(stop=stop)
    expected = environment.launched_size()
    try:
        with threads_named(HOROVOD):
            hvd.init()
    except ValueError as error:
        raise HorovodInternalError(str(error)) from None
    pmi.taken()
    if expected is not None and expected != hvd.size():
        build = "`hvdtrain horovod build --install`"
        cause = (
            f"it was built for another MPI than the launcher's ({build}), or srun needs --mpi=pmix"
            if hvd.mpi_built()
            else f"it was built without MPI ({build})"
        )
        raise LauncherError(
            f"the launcher started {expected} ranks, but Horovod sees {hvd.size()}: {cause}; for "
            "independent runs set --runtime.standalone true"
        )
    facts = gather_json([socket.gethostname(), sorted(os.sched_getaffinity(0)), gpu], "topology")
    if threads:
        torch.set_num_threads(threads)
    else:
        processors = [fact[:2] for fact in facts]
        _set_threads(machine.cores(), sharers=processors.count(processors[hvd.rank()]))
    hosts, _, gpus = (tuple(each) for each in zip(*facts, strict=True))
    return Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hosts, gpus)


_own_threads: int | None = None  # number that `_set_threads` has set


def _set_threads(cores: int, sharers: int) -> None:
    """Set a rank's threads to cores / ranks that may run on them, unless the user has set them.

    The user sets OMP_NUM_THREADS, or calls torch.set_num_threads. Ranks that a launcher has bound
    to processors of their own share these with no rank. Each generation of an elastic run counts
    again: the number of ranks may have changed.
    """
    global _own_threads
    if re.fullmatch(r"[\s\d,]*\d[\s\d,]*", os.environ.get("OMP_NUM_THREADS", "")):
        return  # OpenMP ignores other values
    if torch.get_num_threads() in (_own_threads, _default_threads()):
        _own_threads = max(1, cores // sharers)
        torch.set_num_threads(_own_threads)


def _default_threads() -> int:
    """Return the number of threads that torch uses if it is not set.

    It is the default of MKL, or else of OpenMP, which a new thread still has.
    """
    names = ("MKL_Get_Max_Threads", "omp_get_max_threads")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        ask = next(getattr(library, name) for name in names if hasattr(library, name))
    except (OSError, StopIteration):  # another kind of build: it is unknown who has set them
        return torch.get_num_threads()
    with ThreadPoolExecutor(1) as pool:
        return int(pool.submit(ask).result())


def is_initialized() -> bool:
    """Whether Horovod was started in this process."""
    return bool(hvd.is_initialized())


class RankPosition(NamedTuple):
    """Position of this process among the current ranks; see Topology."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int


def own_position() -> RankPosition:
    """Return Horovod's own values, for code that has no Topology because users call it."""
    return RankPosition(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())


def shut_down() -> None:
    """End every collective that is in progress, and leave the ranks of this generation."""
    hvd.shutdown()


def abort_collectives() -> None:
    """Fail the collectives that are in progress in this process; safe to call from any thread."""
    hvd.abort()


def controller() -> str:
    """Return Horovod's controller: "mpi" or "gloo"."""
    return "mpi" if hvd.mpi_enabled() else "gloo"


def built_with() -> dict[str, bool]:
    """Return which features Horovod was built with: mpi, gloo, nccl, cuda."""
    return {
        "mpi": bool(hvd.mpi_built()),
        "gloo": bool(hvd.gloo_built()),
        "nccl": bool(hvd.nccl_built()),
        "cuda": bool(hvd.cuda_built()),
    }


# --- Horovod's timeline, which rank 0 writes ----------------------------------


def can_start_timeline() -> bool:
    """Whether the timeline can be started later: HOROVOD_TIMELINE names no file."""
    return os.environ.get("HOROVOD_TIMELINE") == "DYNAMIC"


def start_timeline(path: Path) -> None:
    """Start the timeline.

    Raises:
        OSError: the file cannot be written, which Horovod would not report.
    """
    path.touch()
    hvd.start_timeline(str(path))


def stop_timeline() -> None:
    """Stop the timeline, also after a failure: Horovod must not write to it during shutdown."""
    with suppress(ValueError):
        hvd.stop_timeline()
