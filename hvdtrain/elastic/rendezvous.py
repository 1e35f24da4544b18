"""HTTP protocol between the elastic driver and processes, on Horovod's key-value store server.

GET /news/NUMBER     {"stop": bool, "hosts": bool}
POST /join/NUMBER    requests the process's ranks. Body: the process's status (status.py).
                     Response: a JSON object of ranks, or 404: not yet
POST /alive/NUMBER   {}: sent by a watchdog whose heartbeats are not acknowledged
POST /failed/NUMBER  {"message": str, "step": int or null}: why the process is about to end
POST /replace/NUMBER {"message": str}: the process ends; a new process must take its place
POST /leave/NUMBER   {"message": str}: the process's host is about to be taken away
POST /stuck/NUMBER   {"message": str}: the watchdog cannot end the process; do not wait for it
GET /rank_and_size/HOST:LOCAL_RANK
                     sent by Horovod itself: the ranks that the process received by /join

POST /SCOPE/RANK/SIZE/GENERATION
                     sent by Horovod itself: the addresses of a context's ranks (patch 0008)

Every request is signed with the job's secret, which the launcher passes to ranks in their
environment; the server rejects other requests (patch 0009). Nothing is unpickled. Horovod's
elastic launcher unpickles data from any sender (CVE-2024-10190); this driver does not install
the handler of such requests.
"""

from __future__ import annotations

import http.client
import json
import os
from http import HTTPStatus
from typing import Any, Protocol

# Fields of a rank's assignment, as in Horovod's variables HOROVOD_RANK and so on.
RANKS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
# How long the server holds a request that it cannot answer yet.
_HOLD_SECONDS = 1.0
_REPLY_SECONDS = 5.0


class Driver(Protocol):
    """The driver's methods that the request handler calls."""

    def join(
        self, number: int, seconds: float, status: dict[str, Any]
    ) -> dict[str, Any] | None: ...

    def news(self, number: int) -> dict[str, bool]: ...

    def alive(self, number: int) -> None: ...

    def failed(self, number: int, message: str, step: int | None) -> None: ...

    def replace(self, number: int, message: str) -> None: ...

    def leave(self, number: int, message: str) -> None: ...

    def stuck(self, number: int, message: str) -> None: ...

    def ranks_of(self, host: str, local_rank: int) -> str | None: ...


def make_handler(driver: Driver) -> type:
    """Return the request handler class of the launcher's HTTP server."""
    from horovod.runner.http.http_server import RendezvousHandler

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
                answer = _handle_report(driver, path[0], int(path[1]), json.loads(body))
            except (KeyError, TypeError, ValueError):  # another version of hvdtrain
                return HTTPStatus.BAD_REQUEST, b""
            if answer is None:
                return HTTPStatus.NOT_FOUND, b""
            return HTTPStatus.OK, json.dumps(answer).encode()

    return Handler


def _handle_report(
    driver: Driver, what: str, number: int, body: dict[str, Any]
) -> dict[str, Any] | None:
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
    """Send a request to the driver; return its answer, or None if it has none yet.

    Args:
        body: JSON body of a POST; None: send a GET.

    Raises:
        OSError: the driver does not respond at all, or rejects the request.
    """
    from horovod.runner.common.util import secret

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
    if response.status == HTTPStatus.BAD_REQUEST:
        raise OSError("it rejects the request: is its hvdtrain another version?")
    return json.loads(answer) if response.status == HTTPStatus.OK else None
