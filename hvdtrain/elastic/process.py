"""The processes of an elastic job as its driver knows them, and their ranks in a generation."""

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
        number: unlike any other's in this job; HOROVOD_RANK in its environment at its start.
        slot: its place on the host, HOROVOD_LOCAL_RANK at its start.
        state: starting, waiting, running, removed (told that it takes no part), lost (nobody
            waits for it any more, and it is still there) or gone.
        since: when it came into this state.
        first_round: the number of the first one that it was in; None for a newcomer.
        assignment: its ranks in the newest generation, until it has heard of them.
        status: as it said when it last asked for its ranks.
        heard: it has asked the driver something: its watchdog runs.
        hand_overs_failed: generations with it that failed before it had the state of the run.
        failure: why it ends, as it or its watchdog said.
        failed_step: the step in which it raised an error of its own.
        leaving_since: when its host was taken away, time.monotonic(); None: it was not.
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
        """Whether its host was taken away."""
        return self.leaving_since is not None

    def leave(self, leaves: bool) -> None:
        """Its host was taken away, or is back."""
        if leaves != self.leaving:
            self.leaving_since = time.monotonic() if leaves else None

    def lasted(self) -> float:
        """Seconds in this state."""
        return time.monotonic() - self.since

    def __str__(self) -> str:
        return f"process {self.number} on {self.host}"


def in_order(processes: Sequence[Process]) -> list[Process]:
    """Processes in the order of their ranks: host by host, the oldest process and its host first.

    The oldest is the one that took part first, not the one that was started first: so rank 0,
    which holds the run's folder, stays where it is as long as it lives.
    """
    oldest: dict[str, tuple[float, int]] = {}
    for process in sorted(processes, key=_age):
        oldest.setdefault(process.host, _age(process))
    return sorted(processes, key=lambda p: (oldest[p.host], _age(p)))


def _age(process: Process) -> tuple[float, int]:
    first = math.inf if process.first_round is None else process.first_round
    return first, process.number


def assign(processes: Sequence[Process]) -> list[SlotInfo]:
    """The ranks of a generation, in the order of `in_order`."""
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
    """Such as "signal 9 (Killed)" or "exit code 1"."""
    number = code - 128 if code > 128 else -code
    if number in signal.valid_signals():
        return f"signal {number} ({signal.strsignal(number)})"
    return f"exit code {code}"
