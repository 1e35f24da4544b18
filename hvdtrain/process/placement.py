"""Check that an MPI has placed the ranks as its launcher announced.

An MPI may ignore the number of slots of a host, and then fills the first host without a word.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from hvdtrain.errors import EXIT_USER
from hvdtrain.launch.discovery import is_this_host
from hvdtrain.launch.hostfile import Host, as_text, parse_hosts, total_slots
from hvdtrain.launch.mpi import HOSTS_VARIABLE
from hvdtrain.runtime import environment
from hvdtrain.runtime.collectives import AgreedError, gather_json
from hvdtrain.runtime.mesh import Topology
from hvdtrain.text import plural

Fact = tuple[str, int | None]


def placed() -> Fact:
    """Return the hosts that the launcher announced, or "", and the MPI's ranks on this host."""
    return os.environ.get(HOSTS_VARIABLE, ""), environment.mpi_local_size()


def check_placement(topology: Topology, facts: Sequence[Fact]) -> None:
    """Compare the numbers of ranks per host with the announced ones.

    Names are looked at only if these numbers differ: a host may have several names, for which one
    MPI counts one host and another MPI two.

    Args:
        facts: `placed()` of each rank.

    Raises:
        AgreedError: on all ranks; a host has more or fewer ranks than was announced for it.
    """
    hosts = parse_hosts(facts[0][0]) if facts[0][0] else []
    sizes = [size for _, size in facts if size is not None]
    # Another number of ranks: a program of the announced job has started this one.
    if len(sizes) < len(facts) or total_slots(hosts) != len(sizes):
        return
    if Counter(sizes) == Counter(host.slots for host in hosts for _ in range(host.slots)):
        return
    own = gather_json(_own(hosts), "placement")
    for host, size in zip(own, sizes, strict=True):
        if host is not None and host[1] != size:
            raise AgreedError(
                f"the launcher announced {as_text(hosts)}, but the MPI has started "
                f"{plural(size, 'rank')} on {host[0]}: it does not follow the slots of hosts; "
                "start the ranks with `horovodrun --gloo` or `hvdtrain launch --controller gloo`, "
                "or correct the options of mpirun",
                EXIT_USER,
                0,
            )


def _own(hosts: Sequence[Host]) -> Host | None:
    """Return the announced host that this one is; None if this is unknown."""
    try:
        own = [host for host in hosts if is_this_host(host.name)]
    except OSError:  # a name that ssh alone knows
        return None
    return own[0] if len(own) == 1 else None
