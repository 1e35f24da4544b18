"""Starting Horovod, once, and choosing the device and the number of threads."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from hvdtrain.errors import UserError
from hvdtrain.runtime import environment
from hvdtrain.runtime.topology import Topology

if TYPE_CHECKING:
    import torch


def initialise() -> Topology:
    """Starts Horovod and finds out who takes part.

    Raises:
        UserError: Horovod is not installed, cannot be loaded, or does not fit the launcher.
    """
    environment.prepare()
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise UserError(
            f"Horovod cannot be imported ({error}); build it for this torch and MPI with "
            "`hvdtrain horovod build --install`"
        ) from None
    expected = environment.launched_size()
    hvd.init()
    if expected is not None and expected != hvd.size():
        raise UserError(
            f"the launcher started {expected} ranks, but Horovod sees {hvd.size()}: Horovod was "
            "built for another MPI than the launcher's (`hvdtrain horovod build --install`), "
            "or srun needs --mpi=pmix"
        )
    from hvdtrain.runtime.collectives import gather_json

    facts = gather_json([socket.gethostname(), sorted(os.sched_getaffinity(0))], "topology")
    _set_threads(sharers=facts.count(facts[hvd.rank()]))
    hosts = tuple(host for host, _ in facts)
    return Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hosts)


def _set_threads(sharers: int) -> None:
    """Threads of a rank = cores / ranks that may run on them, unless OMP_NUM_THREADS is set.

    Ranks that a launcher bound to processors of their own share with nobody.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // sharers))


def choose_device(local_rank: int) -> torch.device:
    """cuda:local_rank where torch has CUDA and Horovod was built for it, else the CPU.

    Raises:
        UserError: this host has fewer GPUs than ranks.
    """
    import horovod.torch as hvd
    import torch

    if not torch.cuda.is_available() or not (hvd.nccl_built() or hvd.cuda_built()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"{socket.gethostname()} has {torch.cuda.device_count()} GPUs, but at least "
            f"{local_rank + 1} ranks; start one rank for each GPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
