"""Fakes of what surrounds the elastic driver: launcher, rendezvous, heartbeats, clock, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.elastic import driver as driver_module
from hvdtrain.elastic import processes as processes_module
from hvdtrain.elastic.driver import ElasticDriver
from hvdtrain.elastic.failure_detector import Silence
from hvdtrain.elastic.processes import TrainingProcess
from hvdtrain.elastic.status import ProcessStatus


class Rendezvous:
    """In place of the launcher's HTTP server: no process connects.

    Attributes:
        generations: number of each generation that was set up; -1: the rendezvous was cleared.
        plans: ranks of each of these generations.
    """

    _httpd = SimpleNamespace(server_address=("", 0))

    def __init__(self) -> None:
        self.generations: list[int] = []
        self.plans: list[list[SlotInfo]] = []

    def init(self, plan: list[SlotInfo], generation: int) -> None:
        self.generations.append(generation)
        self.plans.append(plan)

    def stop(self) -> None:
        pass


class _Heartbeats:
    """In place of HeartbeatReceiver: nothing is sent or received."""

    def __init__(self, port: int, secret: bytes) -> None:
        self.detector = SimpleNamespace(longest=0.0, phi=0.0)

    def listen(self, listener: object) -> None:
        pass

    def announce_over(self, numbers: Iterable[int], generation: int) -> None:
        pass

    def begin(self, ranks: Iterable[int]) -> None:
        pass

    def answered(self, number: int) -> None:
        pass

    def drop(self, number: int) -> None:
        pass


class _Thread:
    """A thread that runs only if `run` is called."""

    def __init__(self, target: Callable[[], None], daemon: bool = False) -> None:
        self.run = target

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        pass


class SteppedJob:
    """A real driver without threads, network or real time: the caller makes each thing happen.

    Attributes:
        now: seconds on the driver's clock.
        messages: what the driver has printed.
        found: host -> slots, the result of the next discovery.
    """

    def __init__(
        self, hosts: dict[str, int], np: int, min_np: int, max_np: int, timeout: int
    ) -> None:
        self.now = 1000.0
        self.messages: list[str] = []
        self.found = dict(hosts)
        self.rendezvous = Rendezvous()
        self._codes: dict[int, int] = {}
        self._stamped = 0
        self._patches = ExitStack()
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        threads = SimpleNamespace(
            Thread=_Thread,
            RLock=threading.RLock,
            Condition=threading.Condition,
            Event=threading.Event,
        )
        for module, name, fake in (
            (driver_module, "time", clock),
            (processes_module, "time", clock),
            (driver_module, "threading", threads),
            (driver_module, "HeartbeatReceiver", _Heartbeats),
            (driver_module, "_say", self.messages.append),
        ):
            self._patches.enter_context(patch.object(module, name, fake))
        self.driver = ElasticDriver(
            self.rendezvous, self, min_np, max_np, timeout=timeout, cooldown_range=(1, 1)
        )
        self.discover()
        self.driver.start(np, self._create)
        self._stamp()

    def close(self) -> None:
        self._patches.close()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self.found)

    def _create(self, slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        return self._codes[slot.rank], self.now

    def _stamp(self) -> None:
        """Give new processes the driver's time: their default is the machine's clock."""
        for process in self.processes[self._stamped :]:
            process.since = self.now
        self._stamped = len(self.processes)

    @property
    def processes(self) -> list[TrainingProcess]:
        return self.driver._processes

    @property
    def over(self) -> bool:
        """Whether the driver ends the job."""
        return self.driver._shutdown.is_set() or self.driver._finished.is_set()

    def discover(self) -> None:
        """Run one discovery."""
        with self.driver._changed:
            self.driver._take_over(self.driver._hosts.find())

    def consider(self, seconds: float) -> None:
        """Let `seconds` pass, and the driver decide once."""
        self.now += seconds
        with self.driver._changed:
            self.driver._check_processes()
        self._stamp()

    def join(self, number: int, status: ProcessStatus) -> dict[str, Any] | None:
        return self.driver.join(number, 0.0, asdict(status))

    def exit(self, number: int, code: int) -> None:
        """A process ends."""
        self._codes[number] = code
        self.driver._threads[number].run()
        self._stamp()

    def fall_silent(self, number: int) -> bool:
        return self.driver.on_silence(Silence(number, seconds=2.0, bound=1.0, phi=9.0))
