"""torch.distributed between the ranks that horovodrun started, on one host or on several."""

from __future__ import annotations

import torch

from hvdtrain.parallel.world import join
from hvdtrain.runtime.init import initialise, shut_down


def join_ranks() -> None:
    """Horovod, whose launcher started the ranks, introduces them to each other, and leaves."""
    topology = initialise()
    join(range(topology.world_size), topology, torch.device("cpu"))
    shut_down()
