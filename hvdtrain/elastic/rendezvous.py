"""HTTP protocol between the elastic driver and processes.

request_server.py is the server.

GET /news/NUMBER     {"stop": bool, "hosts": bool}
POST /join/NUMBER    requests the process's ranks. Body: the process's status (status.py).
                     Response: a JSON object of ranks, or 404: not yet
POST /failed/NUMBER  {"message": str, "step": int or null}: why the process is about to end
POST /replace/NUMBER {"message": str}: the process ends; a new process must take its place
POST /leave/NUMBER   {"message": str, "cause": str}: the process's host is about to be taken away,
                     or must not be used further: the cause is a key of host_records.CAUSES, or ""
POST /stuck/NUMBER   {"message": str}: the watchdog cannot end the process; do not wait for it

POST /global/RANK/SIZE/GENERATION
                     sent by Horovod itself: the addresses of all ranks (patch 0008)

Every request is signed with the job's secret, which the launcher passes to ranks in their
environment; the server rejects other requests (patch 0009). Nothing is unpickled. Horovod's
elastic launcher unpickles data from any sender (CVE-2024-10190); this driver does not install
the handler of such requests.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.agent import driver_file
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.agent.hub import Slot

# Fields of a rank's assignment, as in Horovod's variables HOROVOD_RANK and so on.
RANKS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_REPLY_SECONDS = 5.0
_FOLLOW_SECONDS = 1.5  # to connect to a driver that another one may have replaced
_PROBE_SECONDS = 1.0
_SECRET = "HOROVOD_RENDEZVOUS_SECRET"
# Set by `hvdtrain launch` without hosts: the driver's file (agent/driver_file.py), and
# elastic.driver_timeout in seconds.
FILE_VARIABLE = "HVDTRAIN_DRIVER_FILE"
TIMEOUT_VARIABLE = "HVDTRAIN_DRIVER_TIMEOUT"


def environment_of(slot: Slot, address: str, port: int) -> dict[str, str]:
    """Return the variables by which a process finds its driver, at this address."""
    numbers = {f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in RANKS}
    return numbers | {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_ELASTIC": "1",
        "PYTHONUNBUFFERED": "1",
    }


def job_secret() -> bytes:
    """Return the secret that the ranks of this process's elastic job share."""
    return os.environ.get(_SECRET, "").encode()


class DriverAddress:
    """Where a process finds its driver.

    Under `hvdtrain launch` without hosts another driver may replace the first: if the driver does
    not respond, the address is read again from the driver's file.

    Attributes:
        place: address and port of the driver's HTTP server.
        timeout: seconds for which the driver may be away; None: it cannot be replaced.
    """

    def __init__(self, address: str, port: int, env: Mapping[str, str] = os.environ) -> None:
        self.place = address, port
        file = env.get(FILE_VARIABLE)
        self._run = Path(file).parent if file else None
        self.timeout = float(env.get(TIMEOUT_VARIABLE, "60")) if file else None

    def __str__(self) -> str:
        return "{}:{}".format(*self.place)

    def ask(
        self, what: str, number: int, body: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Send a request to the driver, or to the driver that has replaced it.

        Args:
            body: JSON body of a POST; None: send a GET.

        Returns:
            The answer; None: there is none yet.

        Raises:
            OSError: the driver does not respond at all, or rejects the request.
        """
        try:
            return self._ask(what, number, body)
        except OSError:
            if not self.follow():
                raise
            return self._ask(what, number, body)

    def _ask(self, what: str, number: int, body: dict[str, Any] | None) -> dict[str, Any] | None:
        from horovod.runner.common.util import secret

        seconds = _REPLY_SECONDS if self._run is None else _FOLLOW_SECONDS
        connection = http.client.HTTPConnection(*self.place, timeout=seconds)
        try:
            connection.connect()
            connection.sock.settimeout(_REPLY_SECONDS)
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

    def follow(self) -> bool:
        """Adopt the address of a driver that has replaced this one; return whether there is one."""
        if self._run is None:
            return False
        try:
            found = driver_file.read(self._run)
        except (OSError, UserError):
            return False
        if found is None or not found.rendezvous:
            return False
        address, port = self.place
        if port == found.rendezvous and address in found.addresses:
            return False
        for address in found.addresses:
            if _connects(address, found.rendezvous):
                self.place = address, found.rendezvous
                return True
        return False

    def reachable(self) -> bool:
        """Whether the driver, or one that has replaced it, accepts connections."""
        return _connects(*self.place) or self.follow()


def _connects(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_PROBE_SECONDS):
            return True
    except OSError:
        return False
