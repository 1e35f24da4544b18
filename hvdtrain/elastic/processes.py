"""Processes, hosts and slots of an elastic job, and which processes form a generation."""

from __future__ import annotations

import math
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.elastic.status import RENDEZVOUS, ProcessStatus
from hvdtrain.text import plural

# --- processes, and their ranks in a generation ------------------------------


@dataclass
class TrainingProcess:
    """One process of the job. Times are seconds of the driver's clock, time.monotonic().

    Args:
        number: unique in this job; HOROVOD_RANK in its environment at its start.
        slot: its place on the host, HOROVOD_LOCAL_RANK at its start.
        state: starting, waiting, running, removed, lost or gone; see decisions.py.
        since: when it entered this state.
        first_generation: number of its first generation; None for a newcomer.
        status: its status when it last requested ranks.
        responded: it has sent a request to the driver: its watchdog runs.
        spare: it has become a spare since it last ran; it may not have received that answer.
        transfers_failed: generations with it that failed before it had the state of the run.
        failure: why it ends, as reported by itself or its watchdog.
        failed_step: the step in which it raised an error of its own.
        leaving_since: when it had to leave; None: it stays.
        host_retired: its host is about to be taken away; a host found later under the same name
            does not bring it back.
        replaced: it ends, and a new process starts in its slot at once.
        must_end: its state is unknown, so it is ended as soon as it can be reached.
        asked_to_end: the driver has asked it to end.
    """

    number: int
    host: str
    slot: int
    state: str = "starting"
    since: float = 0.0
    first_generation: int | None = None
    status: ProcessStatus | None = None
    responded: bool = False
    spare: bool = False
    transfers_failed: int = 0
    failure: str = ""
    failed_step: int | None = None
    leaving_since: float | None = None
    host_retired: bool = False
    replaced: bool = False
    must_end: bool = False
    asked_to_end: bool = False

    def become(self, state: str, now: float) -> None:
        self.state, self.since = state, now

    @property
    def leaving(self) -> bool:
        """Whether it must leave because its host or slot was taken away."""
        return self.leaving_since is not None

    def leave(self, leaves: bool, now: float) -> None:
        """Record that its host or slot was taken away, or is back."""
        if leaves != self.leaving:
            self.leaving_since = now if leaves else None

    def lasted(self, now: float) -> float:
        """Seconds in this state."""
        return now - self.since

    def __str__(self) -> str:
        return f"process {self.number} on {self.host}"


def in_order(processes: Sequence[TrainingProcess]) -> list[TrainingProcess]:
    """Sort processes in the order of their ranks: host by host, the oldest process and host first.

    The oldest process is the one that took part first, not the one that was started first. Rank 0,
    which holds the run directory, therefore keeps its rank until it ends.
    """
    oldest: dict[str, tuple[float, int]] = {}
    for process in sorted(processes, key=_age):
        oldest.setdefault(process.host, _age(process))
    return sorted(processes, key=lambda p: (oldest[p.host], _age(p)))


def _age(process: TrainingProcess) -> tuple[float, int]:
    first = math.inf if process.first_generation is None else process.first_generation
    return first, process.number


def assign(processes: Sequence[TrainingProcess]) -> list[SlotInfo]:
    """Assign the ranks of a generation, in the order of `in_order`."""
    ordered = in_order(processes)
    hosts = list(dict.fromkeys(p.host for p in ordered))
    size = Counter(p.host for p in ordered)
    peers = [
        [host for host in hosts if size[host] > n] for n in range(max(size.values(), default=0))
    ]
    cross_ranks = [{host: rank for rank, host in enumerate(same)} for same in peers]
    seen, plan = Counter[str](), []
    for rank, process in enumerate(ordered):
        local_rank = seen[process.host]
        seen[process.host] += 1
        plan.append(
            SlotInfo(
                hostname=process.host,
                rank=rank,
                local_rank=local_rank,
                cross_rank=cross_ranks[local_rank][process.host],
                size=len(ordered),
                local_size=size[process.host],
                cross_size=len(peers[local_rank]),
            )
        )
    return plan


def reported_places(processes: Sequence[TrainingProcess]) -> dict[str, tuple[str, int]]:
    """Host -> where a process of it listens, if the last rendezvous of one of them has failed."""
    statuses = [(p.host, p.status) for p in processes if p.status is not None]
    if not any(status.failed == RENDEZVOUS for _, status in statuses):
        return {}
    return {host: status.place for host, status in statuses if status.place is not None}


def describe(code: int) -> str:
    """Describe an exit code, such as "signal 9 (Killed)" or "exit code 1"."""
    number = code - 128 if code > 128 else -code
    if number in signal.valid_signals():
        return f"signal {number} ({signal.strsignal(number)})"
    return f"exit code {code}"


# --- processes that form whole replicas of the model -------------------------


def replica_size(processes: Sequence[TrainingProcess]) -> int:
    """Number of processes that hold one model together, as they report; 1 before any report."""
    return max((p.status.replica_size for p in processes if p.status is not None), default=1)


def choose(waiting: Sequence[TrainingProcess], most: int) -> list[TrainingProcess]:
    """Select as many of `waiting` as form whole replicas, in order; the others are spares.

    Processes on hosts whose number of processes is not a multiple of the replica size are omitted
    first; among these, processes come first that hold no shard, or a shard with many copies. The
    last holder of a shard stays. So does the last process that has completed the newest step: the
    other processes complete it with the gradients that they have. If they repeated it instead, the
    result could differ bitwise from the state of the omitted process, which may return.

    Args:
        most: limit of the number of processes.
    """
    size = replica_size(waiting)
    chosen = [*waiting]
    for _ in range(len(chosen) - min(len(chosen), most) // size * size):
        chosen.remove(_least_useful(chosen, size))
    return chosen


def state_by_host(processes: Sequence[TrainingProcess]) -> dict[str, set[int]]:
    """Host -> what it has of the run's state: shards, and -1 if a process has the newest step."""
    trained = {p.number: p.status.step for p in processes if p.status and p.status.trained}
    newest, shards = max(trained.values(), default=0), _held(processes)
    found: dict[str, set[int]] = {}
    for process in processes:
        held = found.setdefault(process.host, set())
        if trained.get(process.number) == newest:
            held.add(-1)
        if process.number in shards:
            held.add(shards[process.number])
    return found


def _least_useful(chosen: Sequence[TrainingProcess], size: int) -> TrainingProcess:
    held = _held(chosen)
    copies = Counter(held.values())
    on_host = Counter(p.host for p in chosen)
    steps = [p.status.step for p in chosen if p.status and p.number in held]
    newest = max(steps, default=0)

    def use(at: int) -> tuple[bool, bool, int, int, int]:
        process = chosen[at]
        part = held.get(process.number)
        others = len(chosen) if part is None else copies[part] - 1
        beyond = on_host[process.host] % size
        step = process.status.step if process.status and part is not None else None
        is_newest = step == newest and steps.count(newest) == 1
        return others == 0 or is_newest, beyond == 0, beyond, -others, -at

    return chosen[min(range(len(chosen)), key=use)]


def _held(processes: Sequence[TrainingProcess]) -> dict[int, int]:
    """Process number -> its shard, for processes that can provide it as of the newest step."""
    known = {p.number: p.status for p in processes if p.status and p.status.shard is not None}
    top = max((status.step for status in known.values()), default=0)
    return {n: s.shard for n, s in known.items() if s.shard is not None and s.reachable_step >= top}


# --- slots, and pauses before they are used again ----------------------------


_PAUSES = (1.0, 60.0)  # seconds after a first failure; longest pause
_START_PAUSE = 10.0  # longest pause if a process ended before it requested its ranks
_WELL_SECONDS = 60.0  # a process that trained this long proves its slot good
# Each failed state transfer costs the training ranks seconds.
_REFUSED_PAUSES = (60.0, 3600.0)


@dataclass
class _Slot:
    failures: int = 0
    refusals: int = 0
    not_before: float = 0.0


class Slots:
    """The slots of all hosts.

    Args:
        pauses: (first, longest) pause after failures in seconds; default: 1 and 60.
    """

    def __init__(self, pauses: Sequence[float] | None) -> None:
        self._first, self._most = pauses or _PAUSES
        self._slots: dict[tuple[str, int], _Slot] = {}

    def usable(self, host: str, number: int, now: float) -> bool:
        slot = self._slots.get((host, number))
        return slot is None or now >= slot.not_before

    def failed(self, process: TrainingProcess, now: float) -> float:
        """Record that a slot's process has died; return the pause in seconds.

        Args:
            process: still in the state in which it died.
        """
        slot = self._slots.setdefault((process.host, process.slot), _Slot())
        well = process.state == "running" and process.lasted(now) > _WELL_SECONDS
        slot.failures = 1 if well else slot.failures + 1
        most = min(_START_PAUSE, self._most) if process.state == "starting" else self._most
        pause = min(most, self._first * 2 ** min(slot.failures - 1, 10))
        slot.not_before = now + pause
        return pause

    def pause_after_refusal(self, process: TrainingProcess) -> float:
        """Seconds for which a slot is not used after its process is refused."""
        slot = self._slots.get((process.host, process.slot), _Slot())
        first, most = _REFUSED_PAUSES
        return min(most, first * 2 ** min(slot.refusals, 10))

    def refused(self, process: TrainingProcess, for_good: bool, now: float) -> None:
        """Record that a slot's process was refused.

        Args:
            for_good: the slot is not used until `release_refused`.
        """
        pause = math.inf if for_good else self.pause_after_refusal(process)
        slot = self._slots.setdefault((process.host, process.slot), _Slot())
        slot.refusals += 1
        slot.not_before = now + pause

    def release_refused(self) -> None:
        """Release slots of refused processes: after a change of hosts a new process may fit."""
        self._slots = {place: slot for place, slot in self._slots.items() if not slot.refusals}


# --- hosts, as repeated discovery finds them ---------------------------------


# A host is removed after it is missing from this many discoveries in a row.
_MISSING_DISCOVERIES = 2
_SCRIPT_SECONDS = 30.0


class HostList:
    """Host -> slots, in the order of first discovery."""

    def __init__(self) -> None:
        self._missing: dict[str, int] = {}  # host -> discoveries in a row without it
        self._retired: set[str] = set()
        self.slots: dict[str, int] = {}

    def count(self) -> int:
        """Number of slots on all hosts."""
        return sum(self.slots.values())

    def retire(self, host: str) -> None:
        """Remove a host until a discovery misses it: after that the name means another host."""
        self.slots.pop(host, None)
        self._retired.add(host)

    def take_over(self, found: dict[str, int], removals_are_final: bool = False) -> list[str]:
        """Adopt the result of a discovery; return messages about changes.

        Args:
            removals_are_final: a missing host is removed at once.
        """
        self._retired &= found.keys()
        found = {host: slots for host, slots in found.items() if host not in self._retired}
        changes = []
        for host in [h for h in self.slots if h not in found]:
            self._missing[host] = self._missing.get(host, 0) + 1
            if removals_are_final or self._missing[host] >= _MISSING_DISCOVERIES:
                del self.slots[host]
                changes.append(f"{host} is no longer available")
        for host, slots in found.items():
            self._missing.pop(host, None)
            if self.slots.get(host) != slots:
                changes.append(f"{host} has {plural(slots, 'slot')}")
            self.slots[host] = slots
        return changes


def find_hosts(discovery: Any) -> dict[str, int]:
    """Run a discovery. A script is run directly: Horovod would start a new Python for each call.

    Args:
        discovery: Horovod's object: find_available_hosts_and_slots() -> {host: slots}.

    Raises:
        Exception: the discovery failed; for example its script failed or timed out.
    """
    script = getattr(discovery, "_discovery_script", None)
    if script is None:
        return dict(discovery.find_available_hosts_and_slots())
    done = subprocess.run(
        script, shell=True, capture_output=True, text=True, timeout=_SCRIPT_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"{script}: exit code {done.returncode}: {done.stderr.strip()}")
    hosts = {}
    for line in filter(None, map(str.strip, done.stdout.splitlines())):
        host, _, slots = line.partition(":")
        hosts[host] = int(slots or discovery._default_slots)
    return hosts
