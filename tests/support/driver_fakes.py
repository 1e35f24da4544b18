"""The elastic driver's decisions without a driver, and a driver with fakes of its environment."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.elastic import driver as driver_module
from hvdtrain.elastic.decisions import (
    Action,
    EndProcess,
    FormGeneration,
    JobState,
    MakeSpares,
    RemoveProcess,
    ReportResult,
    StartProcess,
    decide,
    has_membership_changes,
    start_processes,
)
from hvdtrain.elastic.driver import ElasticDriver
from hvdtrain.elastic.processes import Slots, TrainingProcess
from hvdtrain.elastic.status import ProcessStatus

_MOST_LOOKS = 100  # until nothing is due


class Rendezvous:
    """Replacement of the launcher's HTTP server: no process connects.

    Attributes:
        generations: number of each generation that was set up; -1: the rendezvous was cleared.
        plans: ranks of each of these generations.
    """

    port, secret = 0, ""

    def __init__(self) -> None:
        self.generations: list[int] = []
        self.plans: list[list[SlotInfo]] = []

    def init(self, plan: list[SlotInfo], generation: int) -> None:
        self.generations.append(generation)
        self.plans.append(plan)

    def answer(self, numbers: Iterable[int]) -> None:
        pass

    def stop(self) -> None:
        pass


class _Thread:
    """A thread that runs only if `run` is called."""

    def __init__(self, target: Callable[[], None], daemon: bool = False) -> None:
        self.run = target

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        pass


@dataclass(frozen=True)
class Formed:
    """A generation that was formed.

    Attributes:
        ranks: process -> its rank.
        hosts: rank -> its host.
    """

    number: int
    ranks: dict[int, int]
    hosts: dict[int, str]


class DecidedJob:
    """The decisions of a job without the driver: events change its state, `decide` is performed.

    Attributes:
        now: seconds on the job's clock.
        messages: what the user would read.
        found: host -> slots, the result of the next discovery.
        formed: all generations so far.
        ended: processes that were asked to end, by SIGTERM.
        result: exit code that was reported.
    """

    def __init__(
        self, hosts: dict[str, int], np: int, min_np: int, max_np: int, timeout: int
    ) -> None:
        self.now = 1000.0
        self.messages: list[str] = []
        self.found = dict(hosts)
        self.formed: list[Formed] = []
        self.ended: set[int] = set()
        self.result: int | None = None
        self.state = JobState(min_np, max_np, timeout, Slots((1, 1)))
        self._answers: dict[int, dict[str, Any]] = {}
        self.discover()
        for action in start_processes(self.state, np, self.now):
            self._perform(action)

    def close(self) -> None:
        pass

    @property
    def over(self) -> bool:
        """Whether the job ends."""
        return self.state.killed_since is not None or self.state.over

    def discover(self, fails: bool = False) -> None:
        """Run one discovery."""
        if not fails:
            self.messages += self.state.hosts_found(dict(self.found), self.now)

    def consider(self, seconds: float) -> None:
        """Let `seconds` pass, and perform all actions that are due."""
        self.now += seconds
        for _ in range(_MOST_LOOKS):
            before = pickle.dumps(self.state)
            actions = decide(self.state, self.now)
            assert pickle.dumps(self.state) == before, "a decision changed the state"
            if not actions:
                return
            for action in actions:
                self._perform(action)
        raise AssertionError(f"the decisions do not end: {actions}")

    def _perform(self, action: Action) -> None:
        assert not (self.over and isinstance(action, StartProcess)), "started in an ending job"
        self.state.apply(action, self.now)
        if action.message:
            self.messages.append(action.message)
        match action:
            case EndProcess(number):
                assert number not in self.ended, f"process {number} was asked to end twice"
                self.ended.add(number)
            case ReportResult(exit_code):
                self.result = exit_code
            case RemoveProcess(number, reason):
                self._answers[number] = {"rank": -1} | ({"reason": reason} if reason else {})
            case MakeSpares(numbers):
                spares = [n for n in numbers if self.state.processes[n].spare]
                self._answers |= {n: {"rank": -1, "spare": True} for n in spares}
            case FormGeneration(number, processes, plan):
                for process, slot in zip(processes, plan, strict=True):
                    self._answers[process] = {"rank": slot.rank, "size": slot.size}
                    if self.state.processes[process].spare:
                        self._answers[process]["spare"] = True
                ranks = {n: self._answers[n]["rank"] for n in processes}
                hosts = {slot.rank: slot.hostname for slot in plan}
                self.formed.append(Formed(number, ranks, hosts))

    @property
    def ranks(self) -> dict[int, int]:
        """Process -> its rank in the newest generation."""
        return self.formed[-1].ranks

    # Events.

    def join(self, number: int, status: ProcessStatus) -> dict[str, Any] | None:
        process = self._reachable(number)
        if process is None or self.state.ending_since is not None:
            return {"rank": -1}
        if number not in self._answers:
            self.state.requested(process, status, self.now)
        if process.state == "removed":
            return self._answers.get(number)
        return self._answers.pop(number, {"rank": -1, "spare": True} if process.spare else None)

    def news(self, number: int) -> dict[str, bool]:
        changes = has_membership_changes(self.state, self.now)
        return {"stop": self.state.stop_requested, "hosts": changes}

    def failed(self, number: int, message: str, step: int) -> None:
        if (process := self._reachable(number)) is not None:
            process.failure, process.failed_step = message, step

    def replace(self, number: int, message: str) -> None:
        if (process := self._reachable(number)) is not None:
            self.messages.append(self.state.is_replaced(process, message, self.now))

    def leave(self, number: int, message: str) -> None:
        if (process := self._reachable(number)) is not None:
            self.messages.append(self.state.host_leaves(process, message, self.now))

    def stuck(self, number: int, message: str) -> None:
        process = self.state.processes[number]
        self.messages.append(self.state.given_up(process, message, self.now, must_end=False))

    def exit(self, number: int, code: int) -> None:
        self.messages.append(self.state.exited(self.state.processes[number], code, self.now))

    def fall_silent(self, number: int) -> bool:
        process = self.state.processes[number]
        if process.state not in ("running", "waiting") or self.state.ending:
            return False
        self.messages.append(self.state.given_up(process, "fell silent", self.now, must_end=True))
        return True

    def _reachable(self, number: int) -> TrainingProcess | None:
        process = self.state.processes[number]
        if process.state in ("gone", "lost"):
            return None
        process.responded = True
        return process


class SteppedDriver:
    """A real driver without threads, network or real time: the caller makes each thing happen.

    It is the driver's hub, too.

    Attributes: as DecidedJob, and over_generations: those that were announced to be over.
    """

    on_silence: Callable[[Sequence[int], str], None]
    detector = SimpleNamespace(longest=0.0)

    def __init__(
        self, hosts: dict[str, int], np: int, min_np: int, max_np: int, timeout: int
    ) -> None:
        self.now = 1000.0
        self.messages: list[str] = []
        self.found = dict(hosts)
        self.formed: list[Formed] = []
        self.rendezvous = Rendezvous()
        self.over_generations: list[int] = []
        self.witnesses: Set[str] = set()
        self._seen = 0  # generations of the rendezvous that were recorded
        self._discovery_fails = False
        self._exits: dict[int, Callable[[int], None]] = {}
        self.ended: set[int] = set()
        self._patches = ExitStack()
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        threads = SimpleNamespace(
            Thread=_Thread,
            RLock=threading.RLock,
            Condition=threading.Condition,
            Event=threading.Event,
        )
        for name, fake in (
            ("time", clock),
            ("threading", threads),
            ("say", self.messages.append),
        ):
            self._patches.enter_context(patch.object(driver_module, name, fake))
        self.driver = ElasticDriver(
            self.rendezvous, self, min_np, max_np, timeout=timeout, cooldown_range=(1, 1)
        )
        self.state = self.driver._state
        self.news, self.failed = self.driver.news, self.driver.failed
        self.discover()
        self.driver.start(self, np)

    def close(self) -> None:
        self._patches.close()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        if self._discovery_fails:
            raise RuntimeError("no answer")
        return dict(self.found)

    def start(self, slot: SlotInfo, on_exit: Callable[[int], None]) -> None:
        self._exits[slot.rank] = on_exit

    def end(self, number: int) -> None:
        self.ended.add(number)

    def end_all(self) -> None:
        pass  # `over` shows it

    def set_witnesses(self, hosts: Set[str]) -> None:
        self.witnesses = hosts

    def end_generation(self, generation: int) -> None:
        self.over_generations.append(generation)

    @property
    def over(self) -> bool:
        """Whether the driver ends the job."""
        return self.driver._shutdown.is_set() or self.driver._finished.is_set()

    def discover(self, fails: bool = False) -> None:
        """Run one discovery."""
        self._discovery_fails = fails
        self.driver._discover_once()

    def consider(self, seconds: float) -> None:
        """Let `seconds` pass, and the driver perform all actions that are due."""
        self.now += seconds
        with self.driver._changed:
            self.driver._act()
        self._record_generations()

    def _record_generations(self) -> None:
        """Record new generations, as the rendezvous and the answers to processes show them."""
        seen, self._seen = self._seen, len(self.rendezvous.generations)
        generations = self.rendezvous.generations[seen:]
        for number, plan in zip(generations, self.rendezvous.plans[seen:], strict=True):
            if number >= 0:
                answers = self.driver._answers.items()
                ranks = {n: a["rank"] for n, a in answers if a.get("generation") == number}
                self.formed.append(Formed(number, ranks, {s.rank: s.hostname for s in plan}))

    def join(self, number: int, status: ProcessStatus) -> dict[str, Any] | None:
        return self.driver.join(number, asdict(status))

    # The driver acts on each of these events at once.

    def replace(self, number: int, message: str) -> None:
        self.driver.replace(number, message)
        self._record_generations()

    def leave(self, number: int, message: str) -> None:
        self.driver.leave(number, message)
        self._record_generations()

    def stuck(self, number: int, message: str) -> None:
        self.driver.stuck(number, message)
        self._record_generations()

    def exit(self, number: int, code: int) -> None:
        self._exits[number](code)
        self._record_generations()

    def fall_silent(self, number: int) -> bool:
        process = self.state.processes[number]
        able = process.state in ("running", "waiting") and not self.state.ending
        self.on_silence([number], "no message for 2.00 s")
        self.consider(0.0)
        return able
