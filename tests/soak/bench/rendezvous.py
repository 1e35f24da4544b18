"""Cost of a rendezvous of many ranks: the requests of one generation, without training.

The driver and its HTTP server are real. Ranks are threads of a few processes that send the requests
of a rank at the start of a generation (`Membership.join`, Horovod's GlooContext): its rank
assignment, then the addresses of the context of all ranks. They open no connections to each other.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Callable, Set
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context

from horovod.runner.common.util import secret
from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.elastic.driver import ElasticDriver
from hvdtrain.elastic.rendezvous import DriverAddress
from hvdtrain.elastic.request_server import RequestServer
from hvdtrain.elastic.status import Identity, ProcessStatus

SLOTS = 8  # of a host
ROW_BYTES = 24  # of an IPv4 address in a row
NONCE_BYTES = 8
_LIMIT_SECONDS = 120.0


@dataclass
class Met:
    """One rank in one generation: when it began and ended, and its requests."""

    began: float
    ended: float = 0.0
    requests: int = 0
    sent: int = 0  # bytes of bodies
    received: int = 0


def rendezvous(ranks: int, generations: int) -> Report:
    """Measure the seconds until the last of `ranks` ranks has all addresses, per generation."""
    key = os.urandom(32).hex()
    server = RequestServer(key)
    driver = ElasticDriver(server, _Hosts(ranks), ranks, ranks)
    port = server.start(driver)
    driver.wait_for_available_slots(ranks)
    processes = min(ranks, max(1, len(os.sched_getaffinity(0)) - 1))
    spawned = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawned) as pool:
        driver.start(_Processes(), ranks)
        shares = [range(first, ranks, processes) for first in range(processes)]
        meet = partial(_meet_all, port=port, key=key, generations=generations)
        met = [one for share in pool.map(meet, shares, timeout=_LIMIT_SECONDS) for one in share]
    driver.stop()
    by_generation = list(zip(*met, strict=True))
    # Exclude the first generation, because the processes start at different times.
    seconds = [max(m.ended for m in all_) - max(m.began for m in all_) for all_ in by_generation]
    last = by_generation[-1]
    metrics = [
        BenchMetric(f"rendezvous of {ranks} ranks", "s", seconds, at_most=5.0),
        BenchMetric("requests of a rank", "", [m.requests for m in last]),
        BenchMetric("sent by a rank", "KiB", [m.sent / 1024 for m in last]),
        BenchMetric("received by a rank", "KiB", [m.received / 1024 for m in last]),
    ]
    return Report("rendezvous", metrics, {"ranks": ranks})


class _Hosts:
    """Discovery of simulated hosts with `SLOTS` slots each."""

    def __init__(self, ranks: int) -> None:
        self._slots = {f"host{n}": min(SLOTS, ranks - n * SLOTS) for n in range(-(-ranks // SLOTS))}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._slots)


class _Processes:
    """Simulated processes of the driver, which live until the job ends."""

    def start(self, slot: SlotInfo, on_exit: Callable[[int], None]) -> None:
        pass

    def end(self, number: int) -> None:
        pass

    def set_witnesses(self, hosts: Set[str]) -> None:
        pass

    def end_all(self) -> None:
        pass


def _meet_all(numbers: range, port: int, key: str, generations: int) -> list[list[Met]]:
    os.environ[secret.RENDEZVOUS_SECRET] = key
    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(partial(_meet, port=port, key=key, generations=generations), numbers))


def _meet(number: int, port: int, key: str, generations: int) -> list[Met]:
    found = []
    status = asdict(ProcessStatus(Identity("cpu", "", 1, None)))
    for _ in range(generations):
        met = Met(time.monotonic())
        assignment = None
        while assignment is None:
            _check_time(met)
            met.requests += 1
            assignment = DriverAddress("127.0.0.1", port).ask("join", number, status)
        if assignment["size"] > 1:
            body = os.urandom(NONCE_BYTES) + bytes((assignment["size"] - 1) * ROW_BYTES)
            path = "/global/{rank}/{size}/{generation}".format(**assignment)
            while _request(port, key, "POST", path, body, met) != http.client.OK:
                _check_time(met)  # includes the server's long poll
        met.ended = time.monotonic()
        found.append(met)
    return found


def _check_time(met: Met) -> None:
    if time.monotonic() - met.began > _LIMIT_SECONDS:
        raise TimeoutError(f"the rendezvous was not complete within {_LIMIT_SECONDS:.0f} s")


def _request(port: int, key: str, method: str, path: str, body: bytes, met: Met) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_SECONDS)
    headers = secret.sign_request(key, method, path, body)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    met.received += len(response.read())
    connection.close()
    met.requests += 1
    met.sent += len(body)
    return response.status
