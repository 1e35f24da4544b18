"""torch.distributed between the ranks that horovodrun started, on one host or on several."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

from hvdtrain.errors import UserError
from hvdtrain.runtime.collectives import broadcast_json
from hvdtrain.runtime.init import initialise, shut_down

_LIMIT = timedelta(minutes=5)  # for which a rank waits for another


def join_ranks() -> None:
    """Horovod, whose launcher started the ranks, introduces them to each other, and leaves.

    Raises:
        UserError: this host has no address on the interface that horovodrun chose.
    """
    topology = initialise()
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "lo")
    address, port = broadcast_json([_address(interface), _free_port()], "store")
    shut_down()
    # Else torch would look this host's name up, which may be an address that no other reaches.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    rank, size = topology.rank, topology.world_size
    store = dist.TCPStore(address, port, size, rank == 0, timeout=_LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_LIMIT)


def leave_ranks() -> None:
    """Together: gloo aborts a rank that still talks when its peer leaves."""
    dist.barrier()
    dist.destroy_process_group()


def _address(interface: str) -> str:
    """Of this host on an interface, IPv4."""
    for entry in psutil.net_if_addrs().get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise UserError(f"{socket.gethostname()}: interface {interface} has no IPv4 address")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
