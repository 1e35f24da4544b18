"""Which network interface of a host the ranks of an elastic job use, and the launcher's address.

What the user said comes first: `horovodrun --network-interfaces`, then HOROVOD_GLOO_IFACE. Both
may name several, as hosts may call theirs differently: the first that a host has counts. Where
nothing was said each host takes the interface that leads to the launcher.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

import psutil

from hvdtrain.errors import UserError

_VARIABLE = "HOROVOD_GLOO_IFACE"
_SAID_BY = f"--network-interfaces or {_VARIABLE}"
_LOOPBACK = "127.0.0.1"
# For documentation (RFC 5737): leads to wherever the default route does.
_ELSEWHERE = "192.0.2.1"


def for_launcher(
    said: Sequence[str] | None, env: Mapping[str, str], hosts: Iterable[str]
) -> tuple[dict[str, str], str]:
    """The environment of ranks, and this host's address that they are told.

    Args:
        said: names of --network-interfaces.
        env: the launcher's, which ranks get.
        hosts: those that are known to take part.
    """
    names = list(said or _names(env))
    address = next((a[0] for name in names if (a := _addresses().get(name))), None)
    environment = {**env, _VARIABLE: ",".join(names)} if names else dict(env)
    return environment, address or _address_towards(hosts)


def for_rank(launcher: str, env: MutableMapping[str, str] = os.environ) -> None:
    """Tells Gloo, and NCCL where nobody did, which of this host's interfaces to use.

    Args:
        launcher: its address.
        env: changed in place.

    Raises:
        UserError: this host has none of those that the user named.
    """
    addresses, names = _addresses(), _names(env)
    if names:
        name = next((name for name in names if name in addresses), None)
        if name is None:
            raise UserError(
                f"{socket.gethostname()} has no network interface {' or '.join(names)} "
                f"({_SAID_BY}) with an IPv4 address; it has {', '.join(sorted(addresses))}"
            )
    else:
        # Of the launcher's own host its address is there; the way to it is the loopback.
        ours = any(launcher in all_ for all_ in addresses.values())
        source = launcher if ours else _source_towards(launcher)
        name = next((n for n, all_ in addresses.items() if source in all_), "lo")
    env[_VARIABLE] = name
    env.setdefault("NCCL_SOCKET_IFNAME", name)


def _names(env: Mapping[str, str]) -> list[str]:
    return [name.strip() for name in env.get(_VARIABLE, "").split(",") if name.strip()]


def _address_towards(hosts: Iterable[str]) -> str:
    """This host's address on the way to the first of `hosts` that is another one.

    Where all of them are this host, one that may join later has to reach it too: never the
    loopback address, unless this host has no other. A name of one's own often leads there
    (Debian's /etc/hosts: 127.0.1.1).
    """
    own = [a for all_ in _addresses().values() for a in all_ if not _is_loopback(a)]
    for address in (_resolve(host) for host in hosts):
        if address is not None and address not in own and not _is_loopback(address):
            source = _source_towards(address)
            if source in own:
                return str(source)
    likely = (_resolve(socket.gethostname()), _source_towards(_ELSEWHERE), *own)
    return next((a for a in likely if a is not None and a in own), _LOOPBACK)


def _addresses() -> dict[str, list[str]]:
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


def _resolve(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _source_towards(address: str) -> str | None:
    """This host's own address on the way to `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
