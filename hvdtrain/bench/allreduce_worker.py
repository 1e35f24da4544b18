"""One rank of `hvdtrain bench allreduce`: `python -m hvdtrain.bench.allreduce_worker KIND BYTES...`

Rank 0 prints one JSON line: the median seconds of an all-reduce of each size.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from hvdtrain.errors import EXIT_CRASH, UserError

BUDGET_S = 0.4  # for the repetitions of one size
LEAST, MOST = 3, 200  # repetitions
_COMPUTED = 512  # rows and columns: some milliseconds on one core


@dataclass(frozen=True)
class Side:
    """Ranks that can run an all-reduce.

    Args:
        all_reduce: replaces a float32 vector by its sum over the ranks; the sum is complete when
            it returns.
        leave: called before the rank exits; ends its threads, or the ranks together if their
            library does not do so at exit.
    """

    rank: int
    ranks: int
    device: torch.device
    all_reduce: Callable[[Tensor], None]
    leave: Callable[[], None] = lambda: None


def main(argv: Sequence[str]) -> None:
    """Run one rank. A failed rank exits at once; its launcher then ends the waiting ranks."""
    code = 0
    try:
        kind, *sizes = argv
        side = KINDS[kind]()
        seconds = {size: _seconds(side, int(size)) for size in sizes}
        side.leave()
        if side.rank == 0:
            print(json.dumps({"measured": kind, "seconds": seconds}))
    except UserError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        code = EXIT_CRASH
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


def _seconds(side: Side, size: int) -> float:
    """Median time of this rank over consecutive all-reduces.

    They run in place, on one buffer that was touched before. Rank 0 sets the number of repetitions.
    """
    values = torch.ones(size // 4, device=side.device)
    side.all_reduce(values)
    if not torch.all(values == side.ranks):
        raise RuntimeError(f"the sum of {side.ranks} ranks is wrong: {values[:4].tolist()}")
    values.zero_()
    estimate = _timed(side, values)
    wanted = min(MOST, max(LEAST, int(BUDGET_S / estimate))) if side.rank == 0 else 0
    count = torch.tensor([float(wanted)], device=side.device)
    side.all_reduce(count)
    return median(_timed(side, values) for _ in range(int(count)))


def _timed(side: Side, values: Tensor) -> float:
    begin = time.perf_counter()
    side.all_reduce(values)
    return time.perf_counter() - begin


def _horovod(hierarchical: bool = False, computing: bool = False) -> Side:
    """Horovod on the CPU, with the settings of a run.

    Args:
        computing: another thread of each rank multiplies matrices, as a backward pass does.
    """
    from hvdtrain.runtime import environment
    from hvdtrain.runtime.collectives import begin_sum, completed
    from hvdtrain.runtime.init import initialize

    environment.prepare(hierarchical=hierarchical)
    topology = initialize()

    def all_reduce(values: Tensor) -> None:
        completed(begin_sum(values, f"bench.{values.numel()}"))

    side = Side(topology.rank, topology.world_size, torch.device("cpu"), all_reduce)
    if not computing:
        return side
    stop = threading.Event()
    thread = threading.Thread(target=_compute, args=(stop,), daemon=True)
    thread.start()

    def leave() -> None:
        """End the thread: an interpreter that exits while torch computes in it aborts."""
        stop.set()
        thread.join()

    return replace(side, leave=leave)


def _compute(stop: threading.Event) -> None:
    a = torch.ones(_COMPUTED, _COMPUTED)
    product = torch.empty_like(a)
    while not stop.is_set():
        torch.mm(a, a, out=product)


def _horovod_on_gpus() -> Side:
    """Horovod on this rank's GPU, with NCCL if Horovod was built with it."""
    from hvdtrain.runtime import environment
    from hvdtrain.runtime.collectives import begin_sum, completed
    from hvdtrain.runtime.device import choose_device
    from hvdtrain.runtime.init import initialize

    environment.prepare()
    topology = initialize()
    device = choose_device(topology)

    def all_reduce(values: Tensor) -> None:
        completed(begin_sum(values, f"bench.{values.numel()}"))
        torch.cuda.synchronize(device)

    return Side(topology.rank, topology.world_size, device, all_reduce)


def _mpi() -> Side:
    """MPI_Allreduce, with the settings of a run."""
    from hvdtrain.runtime.mpi import start_ranks

    ranks = start_ranks()
    from mpi4py import MPI

    def all_reduce(values: Tensor) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, values.numpy())

    return Side(ranks.rank, ranks.size, torch.device("cpu"), all_reduce)


def _torch_gloo() -> Side:
    import torch.distributed as dist

    from hvdtrain.bench.plain import join_ranks
    from hvdtrain.parallel.world import leave

    join_ranks()

    def all_reduce(values: Tensor) -> None:
        dist.all_reduce(values)

    rank, size = dist.get_rank(), dist.get_world_size()
    return Side(rank, size, torch.device("cpu"), all_reduce, leave)


KINDS: dict[str, Callable[[], Side]] = {
    "horovod": _horovod,
    "horovod-computing": partial(_horovod, computing=True),
    "horovod-hierarchical": partial(_horovod, hierarchical=True),
    "horovod-gpu": _horovod_on_gpus,
    "mpi": _mpi,
    "torch-gloo": _torch_gloo,
}

if __name__ == "__main__":
    main(sys.argv[1:])
