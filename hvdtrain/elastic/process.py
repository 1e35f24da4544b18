"""The processes of an elastic job as its driver knows them, and their ranks in a round."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod.runner.common.util.hosts import SlotInfo


@dataclass
class Process:
    """One process of the job.

    Args:
        number: unlike any other's in this job; HOROVOD_RANK in its environment at its start.
        slot: its place on the host, HOROVOD_LOCAL_RANK at its start.
        state: starting, waiting, running, removed (told that it takes no part), lost (nobody
            waits for it any more, and it is still there) or gone.
        since: when it came into this state.
        rounds: how many it was in.
        assignment: its ranks in the newest round, until it has heard of them.
        leaving: its host was taken away.
        end: set to end it.
    """

    number: int
    host: str
    slot: int
    state: str = "starting"
    since: float = field(default_factory=time.monotonic)
    rounds: int = 0
    assignment: dict[str, Any] = field(default_factory=dict)
    leaving: bool = False
    end: threading.Event = field(default_factory=threading.Event)

    def become(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    def lasted(self) -> float:
        """Seconds in this state."""
        return time.monotonic() - self.since

    def __str__(self) -> str:
        return f"process {self.number} on {self.host}"


def in_order(processes: Sequence[Process]) -> list[Process]:
    """Processes in the order of their ranks: host by host, the oldest process and its host first.

    So rank 0 stays where it is as long as it lives.
    """
    oldest: dict[str, int] = {}
    for process in sorted(processes, key=lambda p: p.number):
        oldest.setdefault(process.host, process.number)
    return sorted(processes, key=lambda p: (oldest[p.host], p.number))


def assign(processes: Sequence[Process]) -> list[SlotInfo]:
    """The ranks of a round, in the order of `in_order`."""
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
