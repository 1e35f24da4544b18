"""Choice of the ranks' network interface on each host, and of the launcher's address.

The user's choice has priority: `horovodrun --network-interfaces`, then HOROVOD_GLOO_IFACE. Both
may list several names, because names differ between hosts: each host uses the first name that it
has. Without a choice, each host uses the interface that leads to the launcher.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

from hvdtrain.errors import UserError
from hvdtrain.runtime.machine import address_towards, addresses_by_interface, source_towards

_VARIABLE = "HOROVOD_GLOO_IFACE"
_SAID_BY = f"--network-interfaces or {_VARIABLE}"


def for_launcher(
    names: Sequence[str] | None, env: Mapping[str, str], hosts: Iterable[str]
) -> tuple[dict[str, str], str]:
    """Return the ranks' environment, and the address of this host that ranks connect to.

    Args:
        names: from --network-interfaces.
        env: the launcher's environment, which ranks inherit.
        hosts: the hosts known so far.
    """
    names = list(names or _names(env))
    address = next((a[0] for name in names if (a := addresses_by_interface().get(name))), None)
    environment = {**env, _VARIABLE: ",".join(names)} if names else dict(env)
    return environment, address or address_towards(hosts)


def addresses_from(first: str) -> list[str]:
    """Return all IPv4 addresses of this host, beginning with `first`."""
    every = (address for all_ in addresses_by_interface().values() for address in all_)
    return list(dict.fromkeys([first, *every]))


def for_rank(launcher: str, env: MutableMapping[str, str] = os.environ) -> None:
    """Set the interface of this host for Gloo, and for NCCL unless it is already set.

    Args:
        launcher: address of the launcher.
        env: changed in place.

    Raises:
        UserError: this host has none of the interfaces that the user named.
    """
    addresses, names = addresses_by_interface(), _names(env)
    if names:
        name = next((name for name in names if name in addresses), None)
        if name is None:
            raise UserError(
                f"{socket.gethostname()} has no network interface {' or '.join(names)} "
                f"({_SAID_BY}) with an IPv4 address; it has {', '.join(sorted(addresses))}"
            )
    else:
        # The launcher's host has the address itself, but would reach it over the loopback.
        ours = any(launcher in all_ for all_ in addresses.values())
        source = launcher if ours else source_towards(launcher)
        name = next((n for n, all_ in addresses.items() if source in all_), "lo")
    env[_VARIABLE] = name
    env.setdefault("NCCL_SOCKET_IFNAME", name)


def own_address(env: Mapping[str, str] = os.environ) -> str:
    """Return the address of this host at which other ranks find this one, after `for_rank`."""
    found = addresses_by_interface()
    return next((found[name][0] for name in _names(env) if name in found), "127.0.0.1")


def _names(env: Mapping[str, str]) -> list[str]:
    return [name.strip() for name in env.get(_VARIABLE, "").split(",") if name.strip()]
