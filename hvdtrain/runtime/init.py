"""Starting Horovod, once, and choosing the device and the number of threads."""

from __future__ import annotations

import os
import socket

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.runtime import environment
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.topology import Topology


def initialise() -> Topology:
    """Starts Horovod and finds out who takes part; `environment.prepare` comes before.

    Raises:
        UserError: Horovod does not fit the launcher.
        HorovodInternalError: a rank died meanwhile.
    """
    expected = environment.launched_size()
    try:
        hvd.init()
    except ValueError as error:
        raise HorovodInternalError(str(error)) from None
    if expected is not None and expected != hvd.size():
        raise UserError(
            f"the launcher started {expected} ranks, but Horovod sees {hvd.size()}: Horovod was "
            "built for another MPI than the launcher's (`hvdtrain horovod build --install`), "
            "or srun needs --mpi=pmix"
        )
    facts = gather_json([socket.gethostname(), sorted(os.sched_getaffinity(0))], "topology")
    _set_threads(sharers=facts.count(facts[hvd.rank()]))
    hosts = tuple(host for host, _ in facts)
    return Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hosts)


def _set_threads(sharers: int) -> None:
    """Threads of a rank = cores / ranks that may run on them, unless OMP_NUM_THREADS is set.

    Ranks that a launcher bound to processors of their own share with nobody.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // sharers))


def choose_device(local_rank: int) -> torch.device:
    """cuda:local_rank where torch has CUDA and Horovod was built for it, else the CPU.

    Raises:
        UserError: this host has fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if not (hvd.nccl_built() or hvd.cuda_built()):
        logger.warning(
            "CUDA is there, but Horovod was built without it: training on the CPU; "
            "`hvdtrain horovod build --gpu nccl --install` builds it for GPUs"
        )
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"{socket.gethostname()} has {torch.cuda.device_count()} GPUs, but at least "
            f"{local_rank + 1} ranks; start one rank for each GPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
