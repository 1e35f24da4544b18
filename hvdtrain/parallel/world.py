"""A torch.distributed world of some of the ranks: those of one replica of the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.network import LOOPBACK, address_towards, addresses_by_interface
from hvdtrain.runtime.topology import Topology

_INTERFACE = "HOROVOD_GLOO_IFACE"
# For which a rank waits for another: to join, and in each collective.
LIMIT = timedelta(minutes=5)


def join(ranks: Sequence[int], topology: Topology, device: torch.device) -> None:
    """Makes a world of `ranks`, in this order, torch's default group.

    Every rank of the job calls it, each with those that it is one of.
    """
    address, interface = _own_address(topology)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    rank, size = ranks.index(topology.rank), len(ranks)
    store = None
    if rank == 0:
        store = dist.TCPStore(address, 0, size, True, timeout=LIMIT, wait_for_workers=False)
    stores = gather_json([address, store.port] if store else None, "torch.store")
    if store is None:
        host, port = stores[ranks[0]]
        store = dist.TCPStore(host, port, size, False, timeout=LIMIT)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LIMIT)


def leave() -> None:
    """Together with the others: gloo aborts a rank that still talks when its peer leaves."""
    dist.barrier()
    dist.destroy_process_group()


def _own_address(topology: Topology) -> tuple[str, str]:
    """This host's address for the other hosts, and its interface; Horovod's, where it has one."""
    interfaces = addresses_by_interface()
    said = os.environ.get(_INTERFACE, "")
    if said in interfaces:
        return interfaces[said][0], said
    several = len(topology.ranks_by_host()) > 1
    address = address_towards(topology.hosts) if several else LOOPBACK
    return address, next(name for name, found in interfaces.items() if address in found)
