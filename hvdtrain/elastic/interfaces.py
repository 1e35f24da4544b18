"""Which network interface of a host the ranks of an elastic job use, and the launcher's address.

What the user said comes first: `horovodrun --network-interfaces`, then HOROVOD_GLOO_IFACE. Both
may name several, as hosts may call theirs differently: the first that a host has counts. Where
nothing was said each host takes the interface that leads to the launcher.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

from hvdtrain.errors import UserError
from hvdtrain.runtime.network import address_towards, addresses_by_interface, source_towards

_VARIABLE = "HOROVOD_GLOO_IFACE"
_SAID_BY = f"--network-interfaces or {_VARIABLE}"


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
    address = next((a[0] for name in names if (a := addresses_by_interface().get(name))), None)
    environment = {**env, _VARIABLE: ",".join(names)} if names else dict(env)
    return environment, address or address_towards(hosts)


def for_rank(launcher: str, env: MutableMapping[str, str] = os.environ) -> None:
    """Tells Gloo, and NCCL where nobody did, which of this host's interfaces to use.

    Args:
        launcher: its address.
        env: changed in place.

    Raises:
        UserError: this host has none of those that the user named.
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
        # Of the launcher's own host its address is there; the way to it is the loopback.
        ours = any(launcher in all_ for all_ in addresses.values())
        source = launcher if ours else source_towards(launcher)
        name = next((n for n, all_ in addresses.items() if source in all_), "lo")
    env[_VARIABLE] = name
    env.setdefault("NCCL_SOCKET_IFNAME", name)


def _names(env: Mapping[str, str]) -> list[str]:
    return [name.strip() for name in env.get(_VARIABLE, "").split(",") if name.strip()]
