"""Checks of the interfaces that libraries may choose for the way to other hosts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

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
    """Interfaces that a library may choose, and that lead nowhere."""
    return [*_repeated(facts), *_missing(facts)]


def _repeated(facts: Mapping[str, Facts]) -> list[Finding]:
    """One address on several hosts, as Docker's bridge has it: MPI takes them for one network."""
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
        wanted = [word.strip("^=") for word in os.environ.get(variable, "").split(",") if word]
        there = theirs["interfaces"]
        if not wanted or any(
            "/" in word or any(n.startswith(word) for n in there) for word in wanted
        ):
            continue
        found.append(
            Finding(
                "interfaces",
                host,
                f"{variable}={os.environ[variable]} names no interface there; it has "
                f"{', '.join(there) or 'none'}",
                "ranks there do not start, or find no way to the others",
                f"export {variable}={theirs['chosen'] or 'NAME'}   # or unset {variable}",
            )
        )
    return found
