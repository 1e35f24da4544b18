"""The addresses of this host, as the others see them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil

LOOPBACK = "127.0.0.1"
# For documentation (RFC 5737): leads to wherever the default route does.
_ELSEWHERE = "192.0.2.1"


def address_towards(hosts: Iterable[str]) -> str:
    """This host's address on the way to the first of `hosts` that is another one.

    Where all of them are this host, one that may join later has to reach it too: never the
    loopback address, unless this host has no other. A name of one's own often leads there
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
    """The IPv4 addresses of each interface of this host that is up and has any."""
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
    """The IPv4 address of a name, as this host looks it up; None where it finds none."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return None


def source_towards(address: str) -> str | None:
    """This host's own address on the way to `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
