"""The launcher's HTTP server: authentication, and the exchange of rank addresses."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from horovod.runner.common.util import secret
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
from horovod.runner.http.http_server import RendezvousServer
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.elastic import request_server
from hvdtrain.elastic.rendezvous import DriverAddress
from hvdtrain.elastic.request_server import RequestServer, _AddressExchange
from hvdtrain.errors import UserError
from hvdtrain.runtime import interfaces
from tests.soak.bench.rendezvous import rendezvous
from tests.support.runs import environment

KEY = "5a" * 32
RANKS = 5
WAITING = 9  # a process whose ranks are not known yet


class Driver:
    """A driver that echoes the request; its `join` takes no time."""

    def join(self, number: int, status: dict[str, Any]) -> dict[str, Any]:
        return {"rank": number, **status}

    def request(self, number: int, status: dict[str, Any]) -> bool:
        return number != WAITING

    def news(self, number: int) -> dict[str, bool]:
        return {"stop": False, "hosts": False}

    def failed(self, number: int, message: str, step: int | None) -> None:
        raise AssertionError

    def stuck(self, number: int, message: str) -> None:
        raise AssertionError


class Launcher:
    """Horovod's server with `key`, and requests that are signed with any key."""

    def __init__(self, key: str | None) -> None:
        self.server = RendezvousServer(0, key)
        self.port = self.server.start()
        self.server.init([], 1)

    def request(
        self, method: str, path: str, body: bytes = b"", key: str | None = KEY
    ) -> tuple[int, bytes]:
        return self.send(method, path, body, secret.sign_request(key, method, path, body))

    def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()

    def exchange(
        self, rank: int, nonce: bytes, generation: int = 1, size: int = RANKS
    ) -> tuple[int, bytes]:
        """Exchange a row in which each value names its sender and receiver."""
        others = [other for other in range(size) if other != rank]
        row = nonce + b"".join(f"{rank}>{other};".encode() for other in others)
        return self.request("POST", f"/global/{rank}/{size}/{generation}", row)


class DriverServer(Launcher):
    """The same with the server of the elastic driver."""

    def __init__(self) -> None:
        self.server = RequestServer(KEY)
        self.port = self.server.start(Driver())
        self.server.init([], 1)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    one = Launcher(KEY)
    yield one
    one.server.stop()


@pytest.fixture
def driver() -> Iterator[DriverServer]:
    one = DriverServer()
    yield one
    one.server.stop()


@pytest.fixture(params=["static", "elastic"])
def either(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Horovod's server, and the server of the elastic driver."""
    one = DriverServer() if request.param == "elastic" else Launcher(KEY)
    yield one
    one.server.stop()


def _column(rank: int, size: int = RANKS) -> bytes:
    return b"".join(f"{other}>{rank};".encode() for other in range(size) if other != rank)


def test_ranks_receive_only_addresses_of_the_current_context(either: Launcher) -> None:
    with ThreadPoolExecutor(RANKS) as pool:
        for nonce in (b"attempt1", b"attempt2"):
            found = pool.map(lambda rank, n=nonce: either.exchange(rank, n), range(RANKS))
            assert list(found) == [(200, _column(rank)) for rank in range(RANKS)]
    # A repeated request, because the answer was lost, is answered at once.
    assert either.exchange(3, b"attempt2") == (200, _column(3))
    # Another request waits for the others again, and reports after a while that they are missing.
    assert either.exchange(3, b"attempt3") == (404, b"")


@given(st.data(), st.integers(2, 6), st.integers(1, 5))
def test_each_rank_receives_what_the_others_sent_for_it(
    data: st.DataObject, size: int, length: int
) -> None:
    # Few values, so that some bytes are the same in a row.
    value = st.lists(st.sampled_from(b"\0ab"), min_size=length, max_size=length).map(bytes)
    values = data.draw(
        st.lists(st.lists(value, min_size=size, max_size=size), min_size=size, max_size=size)
    )
    exchange = _AddressExchange(size)
    order = data.draw(st.permutations(range(size)))
    exchange.add(order[0], bytes(range(8 + length * (size - 1))))  # replaced by the next row
    for rank in order:
        others = [values[rank][other] for other in range(size) if other != rank]
        exchange.add(rank, bytes([rank] * 8) + b"".join(others))
    assert exchange.over.is_set()
    for rank in range(size):
        of_others = [values[other][rank] for other in range(size) if other != rank]
        assert exchange.column(rank) == b"".join(of_others)
    with pytest.raises(ValueError, match="a row of"):
        exchange.add(0, bytes(9 + length * (size - 1)))


def test_bytes_that_agree_within_a_row_are_stored_once() -> None:
    size, address = 300, b"an address of 16"
    exchange = _AddressExchange(size)
    tracemalloc.start()
    for rank in range(size):
        others = (other.to_bytes(8, "little") + address for other in range(size) if other != rank)
        exchange.add(rank, rank.to_bytes(8, "little") + b"".join(others))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert exchange.over.is_set() and used < 2.5 * size**2, "2 of 24 bytes differ"


@pytest.mark.alone
def test_request_from_an_earlier_generation_is_rejected_at_once(either: Launcher) -> None:
    assert either.exchange(0, b"attempt1", generation=0) == (409, b"")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(either.exchange, 0, b"attempt1")
        time.sleep(0.3)
        began = time.monotonic()
        either.server.init([], 2)
        assert held.result() == (409, b"")
        assert time.monotonic() - began < 0.3, "it was not notified at once"


def test_unsigned_requests_are_refused_and_reported_once(
    launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = {"GET": "/join/0", "HEAD": "/README.md", "PUT": "/global/0", "POST": "/global/0/2/1"}
    for method, path in {**paths, "DELETE": "/global/0"}.items():
        for key in (None, KEY[::-1]):
            assert launcher.request(method, path, b"", key)[0] == 403, (method, key)
    header = secret.sign_request(KEY, "PUT", "/global/0", b"mine")
    assert launcher.send("PUT", "/global/0", b"evil", header)[0] == 403, "another body"
    assert launcher.send("PUT", "/global/1", b"mine", header)[0] == 403, "another path"
    assert launcher.request("GET", "/global/0")[0] == 404, "a refused value was kept"
    said = capfd.readouterr().err
    assert said.count("refused a request of 127.0.0.1: 'GET /join/0 HTTP/1.1' is not") == 1, said
    assert said.count("\n") == 1, "each one was said"
    assert launcher.server._httpd.refused == 12


def test_unsigned_request_to_elastic_driver_is_refused_and_reported_once(
    driver: DriverServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for method, path in {"GET": "/news/0", "PUT": "/a/0", "POST": "/global/0/2/1"}.items():
        for key in (None, KEY[::-1]):
            assert driver.request(method, path, b"", key)[0] == 403, (method, key)
    header = secret.sign_request(KEY, "POST", "/join/0", b"{}")
    assert driver.send("POST", "/join/0", b"[]", header)[0] == 403, "another body"
    assert driver.send("POST", "/join/1", b"{}", header)[0] == 403, "another path"
    assert driver.request("GET", "/news/0")[0] == 200
    for path in ("/join", "/join/x", "/global/0/1", "/global/a/2/1", "/"):
        assert driver.request("POST", path, b"{}")[0] == 400, path
    said = capfd.readouterr().err
    assert said.count("refused a request of 127.0.0.1: 'GET /news/0 HTTP/1.1' is not") == 1, said
    assert said.count("\n") == 1, said


def test_elastic_driver_holds_a_request_until_it_has_an_answer(driver: DriverServer) -> None:
    """Also that of a spare process, which repeats it at once."""
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        held = pool.submit(driver.request, "POST", f"/join/{WAITING}", b"{}")
        time.sleep(0.5)
        assert not held.done()
        driver.server.answer([WAITING])
        assert held.result() == (200, b'{"rank": 9}')
        assert time.monotonic() - began < 1.5
        began = time.monotonic()
        assert driver.request("POST", f"/join/{WAITING}", b"{}")[0] == 200
        assert time.monotonic() - began > 1.5


LATE_RANK = """
import resource, sys, time
import horovod.torch as hvd
late = int(sys.argv[1]) == 1
time.sleep(2.5 * late)
before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
hvd.init()
switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
print(hvd.size(), late or switches < 500)
hvd.shutdown()
"""


def _print_of_ranks(
    monkeypatch: pytest.MonkeyPatch, script: str, hosts: str
) -> tuple[list[str], list[bytes]]:
    """Run `script` as real ranks, one for each letter of `hosts`, with the rank as argument.

    Returns:
        What each rank prints; the nonce of each row that the server received: each exchange of a
        rank has its own.
    """
    nonces: list[bytes] = []
    add = _AddressExchange.add

    def counted(self: _AddressExchange, rank: int, row: bytes) -> None:
        nonces.append(row[:8])
        add(self, rank, row)

    monkeypatch.setattr(_AddressExchange, "add", counted)
    driver = DriverServer()
    driver.server.init([], 0)
    processes = []
    for rank, host in enumerate(hosts):
        local_rank = hosts[:rank].count(host)
        across = [r for r, other in enumerate(hosts) if hosts[:r].count(other) == local_rank]
        names = {"RANK": rank, "SIZE": len(hosts), "HOSTNAME": host, "LOCAL_RANK": local_rank}
        names |= {"LOCAL_SIZE": hosts.count(host), "CROSS_RANK": across.index(rank)}
        names |= {"CROSS_SIZE": len(across), "GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
        names |= {"GLOO_RENDEZVOUS_PORT": driver.port, "CONTROLLER": "gloo"}
        names |= {"CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo", "DYNAMIC_PROCESS_SETS": "1"}
        env = environment({f"HOROVOD_{name}": str(value) for name, value in names.items()})
        env[secret.RENDEZVOUS_SECRET] = KEY
        argv = [sys.executable, "-c", script, str(rank)]
        processes.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate(timeout=60)[0] for process in processes]
    driver.server.stop()
    return printed, nonces


def test_rank_that_waits_sends_its_addresses_once_and_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_server, "_ALIVE_SECONDS", 0.1)
    printed, nonces = _print_of_ranks(monkeypatch, LATE_RANK, "ab")
    assert printed == ["2 True\n"] * 2
    assert len({*nonces}) == 2


PLACED_RANK = """
import torch
import horovod.torch as hvd
some = hvd.ProcessSet([0, 2, 4])
hvd.init(process_sets=[some])
of_rank = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
total = hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum)
of_some = some.included() and hvd.allgather(torch.tensor([hvd.rank()]), process_set=some).tolist()
later = hvd.add_process_set([1, 3])
pair = later.included() and hvd.broadcast(torch.tensor(hvd.rank()), 3, process_set=later).item()
print(*of_rank, total.item(), of_some, pair)
hvd.barrier()  # a rank that shuts down ends the others' collectives
hvd.shutdown()
"""


def test_one_request_per_rank_connects_hosts_and_process_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed, nonces = _print_of_ranks(monkeypatch, PLACED_RANK, "abbab")
    assert printed == [
        "0 2 0 2 10 [0, 2, 4] False\n",
        "0 3 1 2 10 False 3\n",
        "1 3 0 2 10 [0, 2, 4] False\n",
        "1 2 1 2 10 False 3\n",
        "2 3 0 1 10 [0, 2, 4] False\n",
    ]
    assert len({*nonces}) == 5


def test_unsigned_request_is_refused_without_reading_its_body(either: Launcher) -> None:
    with socket.create_connection(("127.0.0.1", either.port), timeout=2) as connection:
        connection.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n")
        assert b" 403 " in connection.recv(100)


def test_requests_from_ranks_and_horovod_are_signed(
    launcher: Launcher, driver: DriverServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(secret.RENDEZVOUS_SECRET, KEY)
    assert DriverAddress("127.0.0.1", driver.port).ask("join", 7, {"step": 3}) == {
        "rank": 7,
        "step": 3,
    }
    put_data_into_kvstore("127.0.0.1", launcher.port, "scope", "key", [1, 2])
    assert read_data_from_kvstore("127.0.0.1", launcher.port, "scope", "key") == [1, 2]
    monkeypatch.setenv(secret.RENDEZVOUS_SECRET, KEY[::-1])
    assert DriverAddress("127.0.0.1", driver.port).ask("join", 7, {}) is None


def test_request_of_another_version_is_rejected_with_its_reason(
    driver: DriverServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(secret.RENDEZVOUS_SECRET, KEY)
    with pytest.raises(OSError, match="is its hvdtrain another version"):
        DriverAddress("127.0.0.1", driver.port).ask(
            "failed", 1, {"text": "a field that this version lacks"}
        )


def test_launcher_without_a_secret_accepts_unsigned_requests() -> None:
    launcher = Launcher(None)
    assert launcher.request("PUT", "/global/0", b"value", key=None)[0] == 200
    assert launcher.request("GET", "/global/0", key=None) == (200, b"value")
    launcher.server.stop()


@pytest.mark.parametrize("ranks", [8, 32])
def test_requests_per_rank_do_not_grow_with_world_size(ranks: int) -> None:
    requests = rendezvous(ranks, 2).metrics[1]
    assert max(requests.values) <= 6, "its ranks, twice, and the addresses; some again"


def test_network_interfaces_set_by_the_user_are_used() -> None:
    said = ["nowhere0", "lo"]
    for option, env in ((said, {"HOROVOD_GLOO_IFACE": "other0"}), (None, {})):
        given = env if option else {"HOROVOD_GLOO_IFACE": ",".join(said)}
        environment, address = interfaces.for_launcher(option, given, [])
        assert (environment["HOROVOD_GLOO_IFACE"], address) == ("nowhere0,lo", "127.0.0.1")
    interfaces.for_rank("192.0.2.1", environment)
    assert environment["HOROVOD_GLOO_IFACE"] == environment["NCCL_SOCKET_IFNAME"] == "lo"
    with pytest.raises(UserError, match="no network interface nowhere0"):
        interfaces.for_rank("192.0.2.1", {"HOROVOD_GLOO_IFACE": "nowhere0"})


def test_launcher_advertises_a_non_loopback_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = [a.address for all_ in psutil.net_if_addrs().values() for a in all_]
    if all(":" in address or address.startswith("127.") for address in ours if "." in address):
        pytest.skip("this machine has no other")
    # Replacement of Debian's /etc/hosts, which this process cannot change for itself.
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    environment, address = interfaces.for_launcher(None, {}, ["localhost", os.uname().nodename])
    assert address in ours and not address.startswith("127."), address
    assert "HOROVOD_GLOO_IFACE" not in environment, "each host chooses its own"
