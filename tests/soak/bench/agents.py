"""Cost of many hosts for the driver of agents: a generation, the time between, another driver.

The driver is a real one in a process of its own. Agents and ranks are coroutines of this process:
an agent is a client of agent/protocol.py with 8 ranks, and a rank sends the requests of a rank at
the start of a generation (see rendezvous.py). They start no processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from horovod.runner.common.util import secret

import hvdtrain
from hvdtrain.agent import driver_file, protocol
from hvdtrain.agent.agent import _RETRY_SECONDS
from hvdtrain.agent.driver_file import DriverFile
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.elastic.status import Identity, ProcessStatus
from hvdtrain.errors import UserError
from hvdtrain.run_files import owner_token
from hvdtrain.supervise.allocation import AllocationDriver, AllocationRun
from tests.soak.bench.rendezvous import NONCE_BYTES, ROW_BYTES, SLOTS

_LIMIT_SECONDS = 300.0
_IDLE_SECONDS = 5.0
_OK = 200


def agents(ranks: int, generations: int) -> Report:
    """Measure `ranks` simulated ranks on agents with 8 slots each."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        argv = [sys.executable, "-m", "tests.soak.bench.agents", str(run), str(ranks)]
        log = Path(directory, "log")
        with log.open("w") as output:
            driver = subprocess.Popen(argv, stderr=output)
        fleet = _Fleet(run, ranks, generations)
        try:
            asyncio.run(fleet.measure(driver))
        except TimeoutError as error:
            raise UserError(f"{error}\n{log.read_text()[-2000:]}") from None
        finally:
            for process in (driver, fleet.successor):
                if process is not None:
                    process.kill()
    found = fleet.found
    metrics = [
        BenchMetric(f"generation of {ranks} ranks", "s", found.seconds[1:]),
        BenchMetric("driver's CPU time for it", "s", found.cpu[1:]),
        BenchMetric("driver's cores between generations", "", [found.idle]),
        BenchMetric("driver's memory, largest", "MB", [found.memory]),
        BenchMetric("registration of all agents", "s", [found.registered]),
        BenchMetric("record of the job", "kB", [found.record]),
        BenchMetric("another driver's address after a kill", "s", [found.published]),
        BenchMetric("all agents with the other driver after", "s", [found.moved]),
        BenchMetric("the next generation with it", "s", [found.next_generation]),
    ]
    return Report("agents", metrics, {"ranks": ranks, "agents": -(-ranks // SLOTS)})


@dataclass
class _Found:
    """Measured values; `seconds` and `cpu` of each generation."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    idle: float = 0.0
    memory: float = 0.0
    registered: float = 0.0
    record: float = 0.0
    published: float = 0.0
    moved: float = 0.0
    next_generation: float = 0.0


class _Fleet:
    """All agents and ranks."""

    def __init__(self, run: Path, ranks: int, generations: int) -> None:
        self._run, self._ranks, self._generations = run, ranks, generations
        self.found = _Found()
        self.successor: subprocess.Popen[bytes] | None = None
        self._hosts = [f"host{n}" for n in range(-(-ranks // SLOTS))]
        self._running: dict[str, dict[str, int]] = {host: {} for host in self._hosts}
        self._channels: dict[str, protocol.Channel] = {}
        self._content: DriverFile | None = None
        self._begin = [asyncio.Event() for _ in range(generations + 2)]
        self._ended: list[list[float]] = [[] for _ in self._begin]
        self._tasks: set[asyncio.Task[None]] = set()

    async def measure(self, driver: subprocess.Popen[bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        began = time.monotonic()
        # In a thread of their own: the ranks' requests must not delay heartbeats.
        threading.Thread(target=asyncio.run, args=(self._run_agents(),), daemon=True).start()
        await self._until(lambda: len(self._channels) == len(self._hosts))
        self.found.registered = time.monotonic() - began
        for number in range(self._generations + 1):
            seconds, cpu = await self._generation(number, driver.pid)
            self.found.seconds.append(seconds)
            self.found.cpu.append(cpu)
        before = _cpu(driver.pid)
        await asyncio.sleep(_IDLE_SECONDS)
        self.found.idle = (_cpu(driver.pid) - before) / _IDLE_SECONDS
        self.found.memory = _peak_memory(driver.pid)
        self.found.record = (self._run / driver_file.STATE_NAME).stat().st_size / 1e3
        await self._replace(driver)
        assert self.successor is not None
        last = self._generations + 1
        self.found.next_generation, _ = await self._generation(last, self.successor.pid)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _generation(self, number: int, driver: int) -> tuple[float, float]:
        """Return wall and CPU seconds of the driver from the first request to the last answer."""
        cpu, began = _cpu(driver), time.monotonic()
        self._begin[number].set()
        await self._until(lambda: len(self._ended[number]) == self._ranks)
        return max(self._ended[number]) - began, _cpu(driver) - cpu

    async def _replace(self, driver: subprocess.Popen[bytes]) -> None:
        """Kill the driver, and start another one as an agent does whose turn is the first."""
        token = owner_token.read(self._run / f"{owner_token.LAUNCH}owner")
        assert token is not None
        before, began = self._content, time.monotonic()
        driver.kill()
        self._channels.clear()
        words = [str(self._run), json.dumps(asdict(token)), str(owner_token.now())]
        argv = [sys.executable, "-m", "hvdtrain.supervise.successor", *words]
        with self._run.with_name("log").open("a") as log:
            self.successor = subprocess.Popen(argv, stderr=log)
        await self._until(lambda: self._content != before)
        self.found.published = time.monotonic() - began
        await self._until(lambda: len(self._channels) == len(self._hosts))
        self.found.moved = time.monotonic() - began

    async def _until(self, condition: Any) -> None:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not condition():
            for task in [task for task in self._tasks if task.done()]:
                task.result()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done within {_LIMIT_SECONDS:.0f} s")
            await asyncio.sleep(0.01)

    def _start(self, number: int) -> None:
        self._tasks.add(asyncio.create_task(self._rank(number)))

    # Agents.

    async def _run_agents(self) -> None:
        agents = [self._agent(host) for host in self._hosts]
        await asyncio.gather(self._follow(), *agents)

    async def _follow(self) -> None:
        while True:
            with suppress(OSError):
                self._content = driver_file.read(self._run)
            await asyncio.sleep(0.05)

    async def _agent(self, host: str) -> None:
        while True:
            await asyncio.sleep(random.uniform(0, _RETRY_SECONDS[1]))
            content = self._content
            if content is not None and not content.exit_code:
                with suppress(OSError):
                    await self._serve(host, content)

    async def _serve(self, host: str, content: DriverFile) -> None:
        channel = await protocol.connect("127.0.0.1", content.port, content.key, 10.0)
        slots = min(SLOTS, self._ranks - SLOTS * int(host.removeprefix("host")))
        channel.send(
            {
                "type": "register",
                "agent": host,
                "host": host,
                "slots": slots,
                "version": hvdtrain.__version__,
                "clock": time.time(),
                "running": self._running[host],
                "ended": {},
                "signal": 0,
                "launch": "",
            }
        )
        beats = asyncio.create_task(_beat(channel))
        try:
            while True:
                message = await channel.receive()
                if message["type"] == "welcome":
                    self._channels[host] = channel
                elif message["type"] == "start":
                    number = int(message["number"])
                    self._running[host][str(number)] = int(message["slot"])
                    self._loop.call_soon_threadsafe(self._start, number)
        finally:
            beats.cancel()
            channel.abort()

    # Ranks.

    async def _rank(self, number: int) -> None:
        status = json.dumps(asdict(ProcessStatus(Identity("cpu", "", 1, None)))).encode()
        for generation, begin in enumerate(self._begin):
            await begin.wait()
            code = 0
            while code != _OK:
                code, answer = await self._request("POST", f"/join/{number}", status)
            assignment = json.loads(answer)
            if "size" not in assignment:
                raise TimeoutError(f"rank {number} was given up")
            if assignment["size"] > 1:
                body = _row(assignment["size"])
                path = "/global/{rank}/{size}/{generation}".format(**assignment)
                while (await self._request("POST", path, body))[0] != _OK:
                    pass
            self._ended[generation].append(time.monotonic())

    async def _request(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request; return (0, b"") if the driver does not respond."""
        content = self._content
        assert content is not None
        key = protocol.rendezvous_secret(content.key)
        headers = secret.sign_request(key, method, path, body) | {"Content-Length": len(body)}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", content.rendezvous)
            writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            first = await reader.readuntil(b"\r\n\r\n")
            answer = await reader.read()
            writer.close()
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.2)
            return 0, b""
        return int(first.split(None, 2)[1]), answer


def _row(size: int) -> bytes:
    """Addresses of a rank as Horovod sends them: a sequence number for each pair, one address."""
    row = bytearray((bytes(8) + os.urandom(ROW_BYTES - 8)) * (size - 1))
    numbers = array("Q", range(size - 1)).tobytes()
    for position in range(8):
        row[position::ROW_BYTES] = numbers[position::8]
    return os.urandom(NONCE_BYTES) + row


async def _beat(channel: protocol.Channel) -> None:
    while True:
        await asyncio.sleep(protocol.BEAT_SECONDS)
        channel.send({"type": "beat"})


def _cpu(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


def _peak_memory(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def _drive(run: str, ranks: str) -> int:
    hosts = -(-int(ranks) // SLOTS)
    plan = AllocationRun(int(ranks), int(ranks), SLOTS, 600.0, 60.0, ["true"], Path(run))
    return AllocationDriver(plan, hosts, os.getcwd()).run(os.open(os.devnull, os.O_WRONLY))


if __name__ == "__main__":
    sys.exit(_drive(*sys.argv[1:]))
