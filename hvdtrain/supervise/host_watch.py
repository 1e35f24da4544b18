"""Background watch of hosts: which hosts have fallen silent, and which respond steadily."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hvdtrain.launch.discovery import Probe, answering
from hvdtrain.launch.hostfile import Host

# Each round is a line in the log of every sshd.
_EVERY_SECONDS = 2.0
_AGAIN_SECONDS = 0.5  # after a round in which a host did not respond
ROUND_SECONDS = 2.0
_MISSED_ROUNDS = 2


class HostWatch:
    """Probes the hosts of a job, and hosts that could join it, until `stop`.

    Args:
        job: the hosts on which the job runs.
        listed: returns the current hosts; called in each round.
        probe: probes a host.
    """

    def __init__(self, job: Sequence[Host], listed: Callable[[], list[Host]], probe: Probe) -> None:
        self._job = [host.name for host in job]
        self._listed = listed
        self._probe = probe
        self._missed = dict.fromkeys(self._job, 0)
        self._last_answer = dict.fromkeys(self._job, time.monotonic())
        self._answers_since: dict[Host, float] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def silent(self, seconds: float) -> list[str]:
        """Return hosts of the job that have not responded for `seconds` and at least two rounds."""
        then = time.monotonic() - seconds
        return [
            name
            for name in self._job
            if self._missed[name] >= _MISSED_ROUNDS and self._last_answer[name] <= then
        ]

    def steady(self, seconds: float) -> list[Host]:
        """Return listed hosts that have responded in every round for `seconds`."""
        then = time.monotonic() - seconds
        return [host for host, since in self._answers_since.items() if since <= then]

    def _watch(self) -> None:
        pause = _EVERY_SECONDS
        while not self._stopped.wait(pause):
            listed = self._listed()
            names = list(dict.fromkeys([*self._job, *(host.name for host in listed)]))
            asked = [Host(name, 1) for name in names]
            alive = {host.name for host in answering(asked, self._probe, ROUND_SECONDS)}
            now, before = time.monotonic(), self._answers_since
            self._last_answer |= dict.fromkeys(alive & set(self._job), now)
            self._missed = {n: 0 if n in alive else self._missed[n] + 1 for n in self._job}
            self._answers_since = {h: before.get(h, now) for h in listed if h.name in alive}
            pause = _EVERY_SECONDS if len(alive) == len(names) else _AGAIN_SECONDS
