"""A replica's world ends its own connections only, and the NCCL collectives of all its groups."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvdtrain.parallel import world
from hvdtrain.parallel.world import Connections, abandon, join
from hvdtrain.process import session
from hvdtrain.runtime.mesh import Topology

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


def test_world_that_is_left_again_keeps_no_more_descriptors(
    clients: list[subprocess.Popen[bytes]],
) -> None:
    """Each rendezvous that fails leaves the world again; its peers may not have ended yet."""
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with connections.opened((0,)):
            own = _accepted(server, clients)
        clients[-1].send_signal(signal.SIGSTOP)
        connections._own = {os.fstat(own.fileno()).st_ino}
        before = len(world._sockets())
        for _ in range(5):
            connections.leave()
        assert len(world._sockets()) == before + 1
        own.close()


class _Nccl:
    """NCCL's part of a group, which exists on GPUs only: its abort ends when all are aborted."""

    def __init__(self, all_aborted: threading.Barrier) -> None:
        self._all_aborted = all_aborted

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self._all_aborted.wait(20)


def _groups_with_nccl(all_aborted: threading.Barrier) -> list[Any]:
    cuda, backend = torch.device("cuda"), _Nccl(all_aborted)
    group = SimpleNamespace(_device_types=[cuda], _get_backend=lambda device: backend)
    return [group] * all_aborted.parties


def _join(monkeypatch: pytest.MonkeyPatch, device: str = "cpu", elastic: bool = False) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # `join` sets it; the test undoes that
    join([0], Topology(0, 1, 0, 1, ("a",)), torch.device(device), elastic)


@pytest.mark.parametrize("end", ["abort", "leave"])
def test_nccl_collectives_of_all_groups_are_aborted_at_once(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    aborted: list[str] = []
    all_aborted = threading.Barrier(3, lambda: aborted.append(end))
    monkeypatch.setattr(world, "_groups", lambda: _groups_with_nccl(all_aborted))
    getattr(Connections(), end)()
    assert aborted == [end]


def test_groups_stay_usable_until_their_world_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # generations
        _join(monkeypatch)
        group = dist.new_group([0])
        assert {dist.group.WORLD, group} == set(world._groups())
        world._abort_nccl(world._groups())  # no NCCL here
        dist.all_reduce(torch.ones(1), group=group)
        abandon()
        abandon()
        assert not world._groups() and not dist.is_initialized()


@pytest.mark.parametrize("elastic", [False, True])
def test_torch_does_not_end_an_elastic_run_that_loses_a_gpu(
    monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    """Only the variables: no process without a GPU can have a group with NCCL."""
    for name in world._NCCL_OF_ELASTIC_RUNS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")  # of the user
    used: dict[str, str] = {}

    def initialize(backend: str, **_: Any) -> None:
        assert backend == "cpu:gloo,cuda:nccl"
        used.update({k: v for k, v in os.environ.items() if k.startswith("TORCH_NCCL_")})

    monkeypatch.setattr(dist, "init_process_group", initialize)
    _join(monkeypatch, "cuda:0", elastic)
    assert used.pop("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1"
    assert used.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == ("0" if elastic else None)
    assert len(used) == (len(world._NCCL_OF_ELASTIC_RUNS) - 1 if elastic else 0)


def test_horovods_collectives_fail_before_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(session, "abort_collectives", lambda: order.append("Horovod"))
    monkeypatch.setattr(session.heartbeat.HEARTBEAT, "generation_over", False)
    strategy = SimpleNamespace(abort_collectives=lambda: order.append("torch"))
    own: Any = SimpleNamespace(_strategy=strategy)
    session.Session._abort(own)
    assert order == ["Horovod", "torch"]


# Two ranks of a world: one is stopped in a collective while the other one enters it and leaves.
_RANK = """
import sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
from hvdtrain.parallel import world

def gathered(value, name):
    found = [None, None]
    dist.all_gather_object(found, value)
    return found

world.gather_json = gathered
rank, port = map(int, sys.argv[1:])
connections = world.Connections()
with connections.opened((0, 1)):
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    dist.barrier()
print("formed", flush=True)
if rank == 0:
    sys.stdin.readline()
    threading.Thread(target=lambda: (time.sleep(0.2), connections.abort())).start()
try:
    dist.all_reduce(torch.zeros(1000))
except RuntimeError as error:
    print(f"failed: {error}".replace("\\n", " "), flush=True)
else:
    print("completed", flush=True)
connections.leave()
world.abandon()
"""


def test_rank_short_of_cpu_time_is_not_forgotten_by_a_peer_that_leaves() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    leaving, stopped = ranks
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "formed\n"
        time.sleep(0.5)  # the second rank reaches the collective
        stopped.send_signal(signal.SIGSTOP)
        assert leaving.stdin is not None
        leaving.stdin.write("\n")
        leaving.stdin.flush()
        time.sleep(1.0)  # the first rank enters it, and gets the notice that the generation is over
        stopped.send_signal(signal.SIGCONT)
        said = stopped.communicate(timeout=60)[0]
        assert "Timed out" not in said and stopped.returncode == 0, said
        assert leaving.wait(60) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
