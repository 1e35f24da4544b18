"""Between the elastic driver and the processes: HTTP beside Horovod's own key-value store.

GET /join/NUMBER   a JSON object of ranks, or 404: not yet
GET /news/NUMBER   {"stop": bool, "hosts": bool}
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
from typing import Any, Protocol

from horovod.runner.common.util import secret
from horovod.runner.http.http_server import RendezvousHandler

# How long the server keeps a request that it has no answer for.
_HOLD_SECONDS = 1.0
_REPLY_SECONDS = 5.0


class Driver(Protocol):
    """What a handler asks."""

    def join(self, number: int, seconds: float) -> dict[str, int] | None: ...

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
        path = f"/{what}/{number}"
        key = os.environ.get(secret.RENDEZVOUS_SECRET)
        connection.request("GET", path, headers=secret.sign_request(key, "GET", path))
        response = connection.getresponse()
        body = response.read()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
    return json.loads(body) if response.status == 200 else None
