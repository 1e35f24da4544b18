"""torch.distributed for ranks that horovodrun started, on one or several hosts."""

from __future__ import annotations

import torch

from hvdtrain.parallel.world import join
from hvdtrain.runtime.init import initialise, shut_down


def join_ranks() -> None:
    """Join torch.distributed with Horovod as the rendezvous, then shut Horovod down."""
    topology = initialise()
    join(range(topology.world_size), topology, torch.device("cpu"))
    shut_down()
