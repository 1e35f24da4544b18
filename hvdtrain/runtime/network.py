"""Addresses of this host, as other hosts see them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil

LOOPBACK = "127.0.0.1"
# Documentation address (RFC 5737): its route is the default route.
_ELSEWHERE = "192.0.2.1"


def address_towards(hosts: Iterable[str]) -> str:
    """Return this host's address on the route to the first other host in `hosts`.

    If all of them are this host, a host that joins later must also reach the address: it is not a
    loopback address unless this host has no other. A host's own name often resolves to loopback
    (Debian's /etc/hosts: 127.0.1.1).
    """
    own = [a for all_ in addresses_by_interface().values() for a in all_ if not _is_loopback(a)]
    for address in (resolve(host) for host in hosts):
        if address is not None and address not in own and not _is_loopback(address):
            source = source_towards(address)
            if source in own:
                return str(source)
    likely = (resolve(socket.gethostname()), source_towards(_ELSEWHERE), *own)
    return next((a for a in likely if a is not None and a in own), LOOPBACK)


def addresses_by_interface() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each interface of this host that is up and has any."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {
        name: [a.address for a in all_ if a.family == socket.AF_INET]
        for name, all_ in psutil.net_if_addrs().items()
        if name in up
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def resolve(host: str) -> str | None:
    """Return the IPv4 address of a name, as this host resolves it; None if it cannot."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return None


def source_towards(address: str) -> str | None:
    """Return this host's own address on the route to `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
