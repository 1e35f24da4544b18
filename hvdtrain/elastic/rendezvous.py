"""Between the elastic driver and the processes: HTTP beside Horovod's own key-value store.

GET /news/NUMBER     {"stop": bool, "hosts": bool}
POST /join/NUMBER    a process asks for its ranks: a JSON object of them, or 404: not yet.
                     Its body says where the process stands (membership.py)
POST /alive/NUMBER   {}: by its watchdog, whose heartbeats are not acknowledged
POST /failed/NUMBER  {"message": str, "step": int or null}: the process is about to end for this
POST /replace/NUMBER {"message": str}: a new process is to take the place of this one, which ends
POST /leave/NUMBER   {"message": str}: its host is about to be taken away
POST /stuck/NUMBER   {"message": str}: its watchdog cannot end it; it is not to be waited for
GET /rank_and_size/HOST:LOCAL_RANK
                   asked by Horovod itself, for what the process has got by /join

POST /SCOPE/RANK/SIZE/GENERATION
                   by Horovod itself: the addresses of a context's ranks (patch 0008)

Every request is signed with the job's secret, which ranks have from the launcher in their
environment; the server refuses others (patch 0009). Nothing is unpickled. Horovod's elastic
launcher unpickles what anybody sends it (CVE-2024-10190); with this driver its handler of such
requests is not there.
"""

from __future__ import annotations

import http.client
import json
import os
from http import HTTPStatus
from typing import Any, Protocol

from horovod.runner.common.util import secret
from horovod.runner.http.http_server import RendezvousHandler

# How long the server keeps a request that it has no answer for.
_HOLD_SECONDS = 1.0
_REPLY_SECONDS = 5.0


class Driver(Protocol):
    """What a handler asks."""

    def join(
        self, number: int, seconds: float, standing: dict[str, Any]
    ) -> dict[str, Any] | None: ...

    def news(self, number: int) -> dict[str, bool]: ...

    def alive(self, number: int) -> None: ...

    def failed(self, number: int, message: str, step: int | None) -> None: ...

    def replace(self, number: int, message: str) -> None: ...

    def leave(self, number: int, message: str) -> None: ...

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

        def _answer(self, path: list[str], body: bytes) -> tuple[int, bytes]:
            if len(path) != 2:
                return super()._answer(path, body)
            try:
                answer = _told(driver, path[0], int(path[1]), json.loads(body))
            except (KeyError, TypeError, ValueError):  # another version of hvdtrain
                return HTTPStatus.BAD_REQUEST, b""
            if answer is None:
                return HTTPStatus.NOT_FOUND, b""
            return HTTPStatus.OK, json.dumps(answer).encode()

    return Handler


def _told(driver: Driver, what: str, number: int, body: dict[str, Any]) -> dict[str, Any] | None:
    if what == "join":
        return driver.join(number, _HOLD_SECONDS, body)
    if what == "alive":
        driver.alive(number)
    elif what == "failed":
        driver.failed(number, body["message"], body.get("step"))
    elif what == "replace":
        driver.replace(number, body["message"])
    elif what == "leave":
        driver.leave(number, body["message"])
    elif what == "stuck":
        driver.stuck(number, body["message"])
    else:
        raise ValueError(what)
    return {}


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
        path = f"/{what}/{number}"
        method, text = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        key = os.environ.get(secret.RENDEZVOUS_SECRET)
        headers = secret.sign_request(key, method, path, text)
        connection.request(method, path, text or None, headers)
        response = connection.getresponse()
        answer = response.read()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
    return json.loads(answer) if response.status == 200 else None
