"""Hosts of a supervised run: which are usable, which are silent, and their cleanup."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from hvdtrain.errors import UserError
from hvdtrain.launch.discovery import Probe, answering, is_this_host, passing
from hvdtrain.launch.hostfile import Host
from hvdtrain.launch.mpi import SSH_OPTIONS
from hvdtrain.run_files.host_records import LAUNCH_VARIABLE

# --- hosts that a supervisor may use now --------------------------------------


class KnownHosts:
    """The listed hosts, except hosts that are excluded for a while.

    Args:
        read: reads the list of hosts; called repeatedly.
        probe: probes whether a host responds.

    Raises:
        UserError: as `read`. Later errors of `read` are ignored and the last list is kept, because
            the file may be being edited.
    """

    def __init__(self, read: Callable[[], list[Host]], probe: Probe) -> None:
        self._read = read
        self._probe = probe
        self._last = read()
        self._aside: dict[str, float] = {}

    def listed(self) -> list[Host]:
        """Return the hosts that are not excluded, whether or not they respond."""
        with contextlib.suppress(UserError):
            self._last = self._read()
        now = time.monotonic()
        return [host for host in self._last if self._aside.get(host.name, 0.0) <= now]

    def reachable(self, timeout: float) -> list[Host]:
        """Return the hosts in `listed` that respond within `timeout` seconds."""
        return answering(self.listed(), self._probe, timeout)

    def exclude(self, names: Iterable[str], seconds: float) -> None:
        """Exclude hosts for `seconds`."""
        self._aside |= dict.fromkeys(names, time.monotonic() + seconds)


# Background watch of hosts: which hosts have fallen silent, and which respond steadily.


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


# Cleanup of processes that an earlier start of a run may have left on its hosts.
#
# When ranks are started again, no old rank may hold the run's files, a port or a GPU.


_SECONDS = 6.0
_SCRIPT = """\
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  pids=$(grep -lzsFx -e {entry} /proc/[0-9]*/environ | cut -d/ -f3)
  [ -z "$pids" ] && exit 0
  kill -9 $pids 2>/dev/null
  sleep 0.3
done
exit 1"""


def end_orphans(hosts: Sequence[str], launch_id: str) -> list[str]:
    """Kill every process of a launch, on all hosts in parallel.

    Returns:
        The hosts on which this failed or could not be tried.
    """
    script = _SCRIPT.format(entry=shlex.quote(f"{LAUNCH_VARIABLE}={launch_id}"))
    end = time.monotonic() + _SECONDS

    def sweep(host: str) -> bool:
        here = is_this_host(host)  # resolving the name may take long
        left = end - time.monotonic()
        if left <= 0:
            return False  # the next start may have begun, which a late sweep would kill
        # ssh passes the script to a login shell as one string; here sh gets it unchanged.
        argv = ["sh", "-c", script] if here else ["ssh", *SSH_OPTIONS, host, script]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=left, check=False
            )
            return done.returncode == 0
        return False

    clean = passing(hosts, sweep, _SECONDS)
    return [host for host in hosts if host not in clean]
