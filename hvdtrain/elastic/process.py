"""The driver's record of the processes of an elastic job, and their ranks in a generation."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.elastic.failures import ProcessStatus


@dataclass
class Process:
    """One process of the job.

    Args:
        number: unique in this job; HOROVOD_RANK in its environment at its start.
        slot: its place on the host, HOROVOD_LOCAL_RANK at its start.
        state: starting, waiting, running, removed (excluded from the run), lost (given up, but
            still there) or gone; see driver.py.
        since: when it entered this state, time.monotonic().
        first_round: number of its first generation; None for a newcomer.
        assignment: its ranks in the newest generation, until it has received them.
        status: its status when it last requested ranks.
        heard: it has sent a request to the driver: its watchdog runs.
        hand_overs_failed: generations with it that failed before it had the state of the run.
        failure: why it ends, as reported by itself or its watchdog.
        failed_step: the step in which it raised an error of its own.
        leaving_since: when it had to leave, time.monotonic(); None: it stays.
        replaced: it ends, and a new process starts in its slot at once.
        end: set to end it.
    """

    number: int
    host: str
    slot: int
    state: str = "starting"
    since: float = field(default_factory=time.monotonic)
    first_round: int | None = None
    assignment: dict[str, Any] = field(default_factory=dict)
    status: ProcessStatus | None = None
    heard: bool = False
    hand_overs_failed: int = 0
    failure: str = ""
    failed_step: int | None = None
    leaving_since: float | None = None
    replaced: bool = False
    end: threading.Event = field(default_factory=threading.Event)

    def become(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    @property
    def leaving(self) -> bool:
        """Whether it must leave because its host or slot was taken away."""
        return self.leaving_since is not None

    def leave(self, leaves: bool) -> None:
        """Record that its host or slot was taken away, or is back."""
        if leaves != self.leaving:
            self.leaving_since = time.monotonic() if leaves else None

    def lasted(self) -> float:
        """Seconds in this state."""
        return time.monotonic() - self.since

    def __str__(self) -> str:
        return f"process {self.number} on {self.host}"


def in_order(processes: Sequence[Process]) -> list[Process]:
    """Sort processes in the order of their ranks: host by host, the oldest process and host first.

    The oldest process is the one that took part first, not the one that was started first. Rank 0,
    which holds the run directory, therefore keeps its rank until it ends.
    """
    oldest: dict[str, tuple[float, int]] = {}
    for process in sorted(processes, key=_age):
        oldest.setdefault(process.host, _age(process))
    return sorted(processes, key=lambda p: (oldest[p.host], _age(p)))


def _age(process: Process) -> tuple[float, int]:
    first = math.inf if process.first_round is None else process.first_round
    return first, process.number


def assign(processes: Sequence[Process]) -> list[SlotInfo]:
    """Assign the ranks of a generation, in the order of `in_order`."""
    ordered = in_order(processes)
    hosts = list(dict.fromkeys(p.host for p in ordered))
    local = {host: [p for p in ordered if p.host == host] for host in hosts}
    plan = []
    for rank, process in enumerate(ordered):
        local_rank = local[process.host].index(process)
        peers = [host for host in hosts if len(local[host]) > local_rank]
        plan.append(
            SlotInfo(
                hostname=process.host,
                rank=rank,
                local_rank=local_rank,
                cross_rank=peers.index(process.host),
                size=len(ordered),
                local_size=len(local[process.host]),
                cross_size=len(peers),
            )
        )
    return plan


def describe(code: int) -> str:
    """Describe an exit code, such as "signal 9 (Killed)" or "exit code 1"."""
    number = code - 128 if code > 128 else -code
    if number in signal.valid_signals():
        return f"signal {number} ({signal.strsignal(number)})"
    return f"exit code {code}"
