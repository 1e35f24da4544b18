"""A replica's world shuts down its own connections only."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hvdtrain.parallel import world
from hvdtrain.parallel.world import Connections

_CLIENT = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
_CLIENT += "while data := s.recv(9): s.sendall(data)"


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "gather_json", lambda value, name: [value])


@pytest.fixture
def clients() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for client in started:
        client.kill()
        client.wait()


def _accepted(server: socket.socket, clients: list[subprocess.Popen[bytes]]) -> socket.socket:
    """Accept a connection from another process, which echoes its input."""
    words = [sys.executable, "-I", "-S", "-c", _CLIENT, *map(str, server.getsockname())]
    clients.append(subprocess.Popen(words))
    server.settimeout(20)
    connection, _ = server.accept()
    connection.settimeout(20)
    return connection


def _answers(connection: socket.socket) -> bool:
    connection.sendall(b"x")
    return connection.recv(9) == b"x"


def _pair(server: socket.socket) -> list[socket.socket]:
    """Return a connection with both ends in the world's processes, here in this one."""
    client = socket.create_connection(server.getsockname())
    return [client, server.accept()[0]]


def test_leaving_a_world_keeps_the_connections_of_other_threads(
    clients: list[subprocess.Popen[bytes]],
) -> None:
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with connections.opened((0,)):
            other, own = _accepted(server, clients), _pair(server)
        connections.leave()
        assert _answers(other)
        assert [end.recv(1) for end in own] == [b"", b""]
        for connection in (other, *own):
            connection.close()


def test_abort_while_a_world_forms_spares_clients_of_earlier_servers(
    clients: list[subprocess.Popen[bytes]],
) -> None:
    connections = Connections()
    with (
        socket.create_server(("127.0.0.1", 0)) as earlier,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        with connections.opened((0,)):
            other = _accepted(earlier, clients)
            forming = socket.create_connection(server.getsockname())
            connections.abort()
            assert _answers(other) and forming.recv(1) == b""
        for connection in (other, forming):
            connection.close()
