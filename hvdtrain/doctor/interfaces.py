"""Checks of the interfaces that libraries may choose to reach other hosts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.here import Facts

_INTERFACE_VARIABLES = (
    "HOROVOD_GLOO_IFACE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMPI_MCA_btl_tcp_if_include",
    "OMPI_MCA_oob_tcp_if_include",
)


def check_interfaces(facts: Mapping[str, Facts]) -> list[Finding]:
    """Find interfaces that a library may choose but that lead to no other host."""
    return [*_repeated(facts), *_missing(facts)]


def _repeated(facts: Mapping[str, Facts]) -> list[Finding]:
    """Find an address that several hosts have, as Docker's bridge does: MPI sees one network."""
    if os.environ.get("OMPI_MCA_btl_tcp_if_include"):  # noqa: SIM112
        return []
    holders: dict[tuple[str, str], list[str]] = {}
    for host, theirs in facts.items():
        for name, interface in theirs["interfaces"].items():
            for address in interface["addresses"]:
                holders.setdefault((name, address), []).append(host)
    chosen = next((theirs["chosen"] for theirs in facts.values() if theirs["chosen"]), "eth0")
    return [
        Finding(
            "interfaces",
            ", ".join(hosts),
            f"{name} has the same address, {address}, on {len(hosts)} hosts",
            "Open MPI uses every interface: ranks connect to their own host, and MPI hangs",
            f"export OMPI_MCA_btl_tcp_if_include={chosen} OMPI_MCA_oob_tcp_if_include={chosen}",
        )
        for (name, address), hosts in holders.items()
        if len(hosts) > 1
    ]


def _missing(facts: Mapping[str, Facts]) -> list[Finding]:
    found = []
    for variable, (host, theirs) in itertools.product(_INTERFACE_VARIABLES, facts.items()):
        value, there = os.environ.get(variable, ""), theirs["interfaces"]
        if not value or _allows(value, there):
            continue
        leaves = "leaves" if value.startswith("^") else "names"
        found.append(
            Finding(
                "interfaces",
                host,
                f"{variable}={value} {leaves} no interface there; it has "
                f"{', '.join(there) or 'none'}",
                "ranks there do not start, or find no way to the others",
                f"export {variable}={theirs['chosen'] or 'NAME'}   # or unset {variable}",
            )
        )
    return found


def _allows(value: str, names: Iterable[str]) -> bool:
    """Whether a list of interfaces matches any interface of a host.

    As in NCCL's documentation: a leading `^` excludes the following names, a leading `=` (or `^=`)
    requires exact names; otherwise a word is a prefix. Networks, such as 10.0.0.0/8, always
    match.
    """
    excludes = value.startswith("^")
    exact = value.lstrip("^").startswith("=")
    words = [word for word in value.lstrip("^=").split(",") if word]
    if not words or (not excludes and any("/" in word for word in words)):
        return True

    def listed(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return any(listed(name) != excludes for name in names)


def nccl_begins_with(theirs: Facts) -> str:
    """The interface that NCCL's ranks on a host with GPUs use to find each other.

    The first whose name begins with `ib`, else the first that does not begin with `docker` (NCCL's
    documentation of NCCL_SOCKET_IFNAME). "": the host has no GPU, or the variable is set.
    """
    if not theirs["gpus"] or os.environ.get("NCCL_SOCKET_IFNAME"):
        return ""
    names = [*theirs["interfaces"]]
    ranked = [name for name in names if name.startswith("ib")]
    ranked += [name for name in names if not name.startswith(("ib", "docker"))]
    return next(iter(ranked), "")


def nccl_ways(facts: Mapping[str, Facts], slots: Mapping[str, int]) -> dict[tuple[str, str], str]:
    """Tests of NCCL's interfaces: (a host, the previous host) -> the previous host's interface.

    Only hosts whose ranks use GPUs are tested: others need not be on that network. Interfaces that
    already are the route to the other hosts are omitted.
    """
    names = {host: nccl_begins_with(facts[host]) for host in facts if slots.get(host)}
    users = [host for host, name in names.items() if name]
    after = dict(zip(users, [*users[1:], *users[:1]], strict=True))
    return {
        (after[host], host): names[host]
        for host in users
        if names[host] != facts[host]["chosen"] and after[host] != host
    }


def nccl_is_not_reached(host: str, theirs: Facts, from_host: str, how: str) -> Finding:
    name, chosen = nccl_begins_with(theirs), theirs["chosen"]
    address = theirs["interfaces"][name]["addresses"][0]
    return Finding(
        "interfaces",
        host,
        f"NCCL begins with {name} there, whose address, {address}, {from_host} does not reach "
        f"({how}); the way between them is {chosen}",
        "ranks on GPUs do not find each other, and the run hangs at its start",
        f"export NCCL_SOCKET_IFNAME={chosen}",
    )
