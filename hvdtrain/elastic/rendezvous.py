"""Between the elastic driver and the processes: HTTP beside Horovod's own key-value store.

GET /join/NUMBER   a JSON object of ranks, or 404: not yet
GET /news/NUMBER   {"stop": bool, "hosts": bool}
GET /rank_and_size/HOST:LOCAL_RANK
                   asked by Horovod itself, for what the process has got by /join

Nothing is unpickled. Horovod's elastic launcher unpickles what anybody sends it
(CVE-2024-10190); with this driver its handler of such requests is not there.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
from collections.abc import Iterable
from typing import Any, Protocol

import psutil
from horovod.runner.http.http_server import RendezvousHandler

# How long the server keeps a request that it has no answer for.
_HOLD_SECONDS = 1.0
_REPLY_SECONDS = 5.0


class Driver(Protocol):
    """What a handler asks."""

    def join(self, number: int, seconds: float) -> dict[str, Any] | None: ...

    def news(self) -> dict[str, bool]: ...

    def ranks_of(self, host: str, local_rank: int) -> str | None: ...


def make_handler(driver: Driver) -> type:
    """The request handler of the launcher's HTTP server."""

    class Handler(RendezvousHandler):
        def _get_value(self, scope: str, key: str) -> bytes | None:
            if scope == "join":
                answer: Any = driver.join(int(key), _HOLD_SECONDS)
            elif scope == "news":
                answer = driver.news()
            elif scope == "rank_and_size":
                host, _, local_rank = key.rpartition(":")
                ranks = driver.ranks_of(host, int(local_rank))
                return None if ranks is None else ranks.encode()
            else:
                return super()._get_value(scope, key)
            return None if answer is None else json.dumps(answer).encode()

    return Handler


def ask(address: str, port: int, what: str, number: int) -> dict[str, Any] | None:
    """Asks the driver; None: it has no answer yet.

    Raises:
        OSError: it does not answer at all.
    """
    connection = http.client.HTTPConnection(address, port, timeout=_REPLY_SECONDS)
    try:
        connection.request("GET", f"/{what}/{number}")
        response = connection.getresponse()
        body = response.read()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
    return json.loads(body) if response.status == 200 else None


def interface_towards(hosts: Iterable[str]) -> str:
    """The network interface through which the first of `hosts` that is not here is reached.

    The loopback interface where all of them are this host.
    """
    own = {a.address: name for name, all_ in psutil.net_if_addrs().items() for a in all_}
    for host in hosts:
        try:
            address = socket.gethostbyname(host)
        except OSError:
            continue
        source = _source_towards(address)
        if address in own or ipaddress.ip_address(address).is_loopback or source is None:
            continue
        return own.get(source, own["127.0.0.1"])
    # All here: the name's own address, which a host that joins later would reach too.
    try:
        return own.get(socket.gethostbyname(socket.gethostname()), own["127.0.0.1"])
    except OSError:
        return own["127.0.0.1"]


def _source_towards(address: str) -> str | None:
    """This host's own address on the way to `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
