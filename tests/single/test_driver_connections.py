"""Connections to a driver's servers from programs that are silent, or have a wrong message."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, patch

import pytest

import hvdtrain
from hvdtrain.agent import protocol
from hvdtrain.agent.connections import DriverConnections
from hvdtrain.agent.hub import Hub
from hvdtrain.elastic.driver import ElasticDriver
from hvdtrain.elastic.request_server import RequestServer
from tests.support.fleet import SECONDS, Fleet
from tests.support.job import poll

FILES, SILENT = 64, 200
SERVER = """
import socket, sys, threading
from contextlib import ExitStack
from hvdtrain.agent import protocol
from hvdtrain.agent.hub import Hub
from hvdtrain.elastic.request_server import RequestServer
from hvdtrain.runtime import queued_output

def say(line):
    print(line, file=sys.stderr, flush=True)

attempts, accept = [], socket.socket.accept
def counted(listener):
    attempts.append(listener)
    return accept(listener)
socket.socket.accept = counted
from hvdtrain.elastic import request_server
request_server.say = say
server = RequestServer("00")
server.start(None)
tls = protocol.new_certificate()[0] if sys.argv[1:] == ["tls"] else None
hub = Hub(b"0", 1, [], "/", print, print, say, tls)
print(server.port, hub.port, flush=True)
with ExitStack() as files:
    for line in sys.stdin:
        if line == "open\\n":
            open("/dev/null").close()
            print("opened", flush=True)
        elif line == "fill\\n":
            try:
                while True:
                    files.enter_context(open("/dev/null"))
            except OSError:
                print("filled", flush=True)
        else:
            print(len(attempts), flush=True)
"""


class Servers:
    """A driver's two servers in a process that may have `FILES` open files."""

    def __init__(self, errors: Path, *options: str) -> None:
        limited = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh", sys.executable, "-c", SERVER]
        pipe = subprocess.PIPE
        self._errors = errors
        with open(errors, "w") as file:
            self._process = subprocess.Popen(
                [*limited, *options], stdin=pipe, stdout=pipe, stderr=file, text=True
            )
        self.ports = [int(port) for port in self._read().split()]

    def ask(self, what: str) -> str:
        assert self._process.stdin
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._read()

    def said(self) -> list[str]:
        return self._errors.read_text().splitlines()

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize(("server", "options"), [(0, []), (1, []), (1, ["tls"])])
def test_silent_connections_leave_the_driver_open_files(
    server: int, options: list[str], tmp_path: Path
) -> None:
    servers = Servers(tmp_path / "errors", *options)
    with ExitStack() as stack:
        stack.callback(servers.close)
        for _ in range(SILENT):
            where = "127.0.0.1", servers.ports[server]
            stack.enter_context(socket.create_connection(where, SECONDS))
            time.sleep(0.001)
        assert servers.ask("open") == "opened"
        poll(lambda: bool(servers.said()), SECONDS, "a message")
        (line,) = servers.said()
        assert "do not show the secret of this job, the newest one from 127.0.0.1" in line


@pytest.mark.parametrize("server", [0, 1])
def test_driver_without_free_files_says_so_once_and_does_not_spin(
    server: int, tmp_path: Path
) -> None:
    servers = Servers(tmp_path / "errors")
    with ExitStack() as stack:
        stack.callback(servers.close)
        # Linux refuses an accept for want of files before it looks for a connection.
        poll(lambda: int(servers.ask("count")) >= 2, SECONDS, "both servers accept")
        assert servers.ask("fill") == "filled"
        where = "127.0.0.1", servers.ports[server]
        stack.enter_context(socket.create_connection(where, SECONDS))
        poll(lambda: bool(servers.said()), SECONDS, "a message")
        first = int(servers.ask("count"))
        poll(lambda: int(servers.ask("count")) > first, SECONDS, "another attempt")
        assert int(servers.ask("count")) < 100
        expected = f"Too many open files: the driver may have {FILES} and needs"
        said = servers.said()
        assert sum(line.startswith(expected) for line in said) == 1, said


def test_failed_accept_of_one_connection_closes_no_other_one() -> None:
    accept, errors = socket.socket.accept, list[OSError]()
    served, closed, said = list[int](), list[int](), list[str]()

    def failing(listener: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return accept(listener)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(served)
        served.append(number)
        try:
            await reader.read()
        finally:
            closed.append(number)
            writer.close()

    async def serve(listener: socket.socket) -> list[int]:
        serving = asyncio.create_task(DriverConnections(2, said.append).serve(listener, handler))
        with ExitStack() as stack:
            for count in (1, 2):
                stack.enter_context(socket.create_connection(listener.getsockname()))
                while len(served) < count:
                    await asyncio.sleep(0.01)
                errors.append(ConnectionAbortedError(errno.ECONNABORTED, "aborted"))
            early = [*closed]
        serving.cancel()
        return early

    with patch.object(socket.socket, "accept", failing):
        listener = socket.create_server(("127.0.0.1", 0))
        assert asyncio.run(asyncio.wait_for(serve(listener), SECONDS)) == []
    assert said == ["a connection cannot be accepted: aborted"]


@pytest.mark.parametrize("server", ["ranks", "agents"])
def test_server_that_fails_ends_with_its_error(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    monkeypatch.setattr(DriverConnections, "serve", AsyncMock(side_effect=ValueError("a defect")))
    if server == "ranks":
        requests = RequestServer("00")
        requests.start(cast("ElasticDriver", None))
        thread = requests._thread
    else:
        thread = Hub(b"0", 1, [], "/", print, print, print)._thread
    thread.join(SECONDS)
    assert [str(error.exc_value) for error in errors] == ["a defect"]


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
