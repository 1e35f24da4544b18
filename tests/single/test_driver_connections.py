"""Connections to a driver's servers from programs that are silent, or have a wrong message."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
from hvdtrain.agent import protocol
from tests.support.fleet import SECONDS, Fleet

FILES, SILENT = 64, 200
SERVER = """
import sys
from hvdtrain.agent.hub import Hub
from hvdtrain.elastic.request_server import RequestServer
server = RequestServer("00")
server.start(None)
hub = Hub(b"0", 1, [], "/", print, print, lambda line: print(line, file=sys.stderr))
print(server.port, hub.port, flush=True)
for line in sys.stdin:
    open("/dev/null").close()
    print("opened", flush=True)
"""


@pytest.mark.parametrize("server", [0, 1])
def test_silent_connections_leave_the_driver_open_files(server: int, tmp_path: Path) -> None:
    limited = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh", sys.executable, "-c", SERVER]
    pipe = subprocess.PIPE
    with (
        open(tmp_path / "errors", "w") as errors,
        subprocess.Popen(limited, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
        ExitStack() as stack,
    ):
        assert process.stdin and process.stdout
        stack.callback(process.kill)
        port = int(process.stdout.readline().split()[server])
        for _ in range(SILENT):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
            time.sleep(0.001)
        process.stdin.write("open\n")
        process.stdin.flush()
        assert process.stdout.readline() == "opened\n"
        assert "Traceback" not in (tmp_path / "errors").read_text()


def test_agent_with_a_wrong_registration_is_refused(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    registration = {"type": "register", "agent": "x", "host": "a", "slots": 1, "clock": 0.0}
    registration |= {"version": hvdtrain.__version__, "running": {"x": 1}, "ended": {}}

    async def register() -> Any:
        where = ("127.0.0.1", fleet.hub.port, bytes.fromhex(fleet.secret), SECONDS)
        channel = await protocol.connect(*where, fleet._certificate)
        channel.send(registration)
        return await asyncio.wait_for(channel.receive(), SECONDS)

    answer = asyncio.run(register())
    assert answer["type"] == "refuse" and "the registration is wrong" in answer["reason"]
    assert fleet.hub.find_available_hosts_and_slots() == {}
    fleet.close()
