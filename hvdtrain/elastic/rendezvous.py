"""Between the elastic driver and the processes: HTTP beside Horovod's own key-value store.

GET /news/NUMBER     {"stop": bool, "hosts": bool}
POST /join/NUMBER    a process asks for its ranks: a JSON object of them, or 404: not yet.
                     Its body says where the process stands (membership.py)
POST /failed/NUMBER  {"message": str, "step": int or null}: the process is about to end for this
POST /stuck/NUMBER   {"message": str}: its watchdog cannot end it; it is not to be waited for
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
from http import HTTPStatus
from typing import Any, Protocol

import psutil
from horovod.runner.http.http_server import RendezvousHandler

# How long the server keeps a request that it has no answer for.
_HOLD_SECONDS = 1.0
_REPLY_SECONDS = 5.0
_LONGEST_BODY = 1 << 16


class Driver(Protocol):
    """What a handler asks."""

    def join(
        self, number: int, seconds: float, standing: dict[str, Any]
    ) -> dict[str, Any] | None: ...

    def news(self, number: int) -> dict[str, bool]: ...

    def failed(self, number: int, message: str, step: int | None) -> None: ...

    def stuck(self, number: int, message: str) -> None: ...

    def ranks_of(self, host: str, local_rank: int) -> str | None: ...


def make_handler(driver: Driver) -> type:
    """The request handler of the launcher's HTTP server."""

    class Handler(RendezvousHandler):
        def _get_value(self, scope: str, key: str) -> bytes | None:
            if scope == "news":
                return json.dumps(driver.news(int(key))).encode()
            if scope == "rank_and_size":
                host, _, local_rank = key.rpartition(":")
                ranks = driver.ranks_of(host, int(local_rank))
                return None if ranks is None else ranks.encode()
            return super()._get_value(scope, key)

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            if length > _LONGEST_BODY:
                return self.send_status_code(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            body = json.loads(self.rfile.read(length))
            _, what, number = self.path.split("/")
            answer: Any = {}
            if what == "join":
                answer = driver.join(int(number), _HOLD_SECONDS, body)
            elif what == "failed":
                driver.failed(int(number), body["message"], body.get("step"))
            elif what == "stuck":
                driver.stuck(int(number), body["message"])
            if answer is None:
                return self.send_status_code(HTTPStatus.NOT_FOUND)
            text = json.dumps(answer).encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler


def ask(
    address: str, port: int, what: str, number: int, body: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Asks the driver; None: it has no answer yet.

    Args:
        body: what it is told with the question.

    Raises:
        OSError: it does not answer at all.
    """
    connection = http.client.HTTPConnection(address, port, timeout=_REPLY_SECONDS)
    try:
        method, text = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, f"/{what}/{number}", text)
        response = connection.getresponse()
        answer = response.read()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
    return json.loads(answer) if response.status == 200 else None


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
