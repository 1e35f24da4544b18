"""Start of ranks that horovodrun started without elastic training: they wait for the slowest one.

Horovod itself waits for HOROVOD_GLOO_TIMEOUT_SECONDS (30), which is also the limit of each of its
later exchanges. A script whose rank 0 downloads or prepares the data first needs longer. Ranks
therefore meet at horovodrun's rendezvous server before they start Horovod, as Horovod's own
contexts do: POST /SCOPE/RANK/SIZE/GENERATION is answered when all ranks have sent it (patch 0008).
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

from hvdtrain.errors import EXIT_PREEMPTED, UserError, crash
from hvdtrain.runtime.environment import elastic
from hvdtrain.runtime.heartbeat import HEARTBEAT

_WAIT_SECONDS = 600.0
_UNREACHABLE_SECONDS = 20.0  # then Horovod reports what is wrong with the server
_RESPONSE_SECONDS = 10.0
_TICK_SECONDS = 0.2
_NONCE_BYTES = 8  # tells a repeated request from the next meeting of the same ranks


def wait(
    env: Mapping[str, str] = os.environ,
    stop: Callable[[], bool] = lambda: False,
    seconds: float = _WAIT_SECONDS,
) -> None:
    """Wait until all ranks of horovodrun have come here; do nothing under another launcher.

    Args:
        env: this process's environment.
        stop: whether this process was asked to stop; it then does not wait any longer.
        seconds: for which it waits.

    Raises:
        UserError: ranks are missing (exit code 1), or this process was asked to stop (75).
    """
    address, port = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), env.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    rank, size = env.get("HOROVOD_RANK"), env.get("HOROVOD_SIZE", "1")
    if address is None or port is None or rank is None or elastic(env) or int(size) == 1:
        return
    path, body = f"/hvdtrain_start/{rank}/{size}/0", secrets.token_bytes(_NONCE_BYTES)
    began = reached = time.monotonic()
    where = f"rank {rank} on {socket.gethostname()}"
    with HEARTBEAT.waiting():
        while time.monotonic() - began < seconds:
            if stop():
                error = UserError(f"{where} was asked to stop before training began")
                error.exit_code = EXIT_PREEMPTED
                raise error
            status = _post(address, int(port), path, body, env)
            if status not in (HTTPStatus.NOT_FOUND, None):
                return  # all ranks have come, or the server is not one of patched Horovod
            if status is not None:
                reached = time.monotonic()
            elif time.monotonic() - reached > _UNREACHABLE_SECONDS:
                return
            time.sleep(_TICK_SECONDS)
    raise crash(f"{where} waited for {seconds:.0f} s: not all of the {size} ranks have started")


def _post(address: str, port: int, path: str, body: bytes, env: Mapping[str, str]) -> int | None:
    """Send a signed request; return the status, or None if there is no answer."""
    from horovod.runner.common.util import secret

    headers: dict[str, str] = {}
    if hasattr(secret, "RENDEZVOUS_SECRET"):
        headers = secret.sign_request(env.get(secret.RENDEZVOUS_SECRET), "POST", path, body)
    server = HTTPConnection(address, port, timeout=_RESPONSE_SECONDS)
    with closing(server):
        try:
            server.request("POST", path, body, headers)
            return server.getresponse().status
        except (OSError, HTTPException):
            return None
