"""A process beside each rank that ends it when it hangs: a hung rank cannot do so itself.

The rank is killed, after what it was doing is written to RUN/logs, when

- it is stopped (SIGSTOP, a frozen terminal) for a second;
- it does something on its own, but finishes nothing, and neither its threads (Horovod's apart)
  nor a process that it started use processor or disk for `hang_seconds` (2 % of a core or 8 kB/s
  are as good as nothing: a thread that samples or exports metrics); if they do, only after 10
  times as long: a slow rank lives. Before it takes part no rank waits for it: it may be idle
  for 10 times as long, and busy without a bound;
- it has no launcher any more: the process that started it is gone, or, while it waits for
  the launcher to say who takes part, the launcher cannot be reached.

An elastic launcher is told why, and also where a killed rank stays: the kernel ends no process
that waits for a dead disk. What follows is the launcher's business, and that of those who see the
rank die: an elastic job continues without it, any other ends.

Time is the watchdog's own, in looks: while the job is suspended, it stands still.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from hvdtrain.elastic.beats import Line
from hvdtrain.elastic.hung_rank import Launcher, end
from hvdtrain.elastic.rendezvous import ask
from hvdtrain.runtime.heartbeat import Activity, Heartbeat
from hvdtrain.runtime.thread_names import threads_named
from hvdtrain.runtime.work import IDLE_TICKS, WATCHDOG, work

_LOOK_SECONDS = 0.25
_LONGEST_LOOK_SECONDS = 0.5  # a look that took longer was suspended meanwhile
_STOPPED_SECONDS = 1.0
_UNREACHABLE_SECONDS = 6.0
_ORPHAN_SECONDS = 2.0
_BUSY_FACTOR = 10
_LOADING_FACTOR = 10
_IDLE_TICKS = IDLE_TICKS * _LOOK_SECONDS
# More than that in a look, but this at most on average: threads that sample or export metrics go
# on while the rank hangs.
_SIDE_TICKS = 2  # a second
# What a rank does on its own -> how many hang_seconds it may be idle.
_IDLE_FACTORS = {
    Activity.LOADING: _LOADING_FACTOR,
    Activity.PREPARING: 1,
    Activity.WORKING: 1,
    Activity.ENDING: 1,
}
_ENDING_SECONDS = 60.0  # at least: a rank bounds its own end (process_end.py)


def start(
    heartbeat: Heartbeat, hang_seconds: float, launcher: str, number: int, line: Line | None
) -> subprocess.Popen[bytes]:
    """Starts the watchdog of this process; it ends with it.

    Args:
        hang_seconds: as elastic.hang_seconds.
        launcher: "address:port" of an elastic launcher, or "".
        number: this process's, as that launcher knows it.
        line: on which it tells that launcher that this process lives.
    """
    command = [sys.executable, "-m", "hvdtrain.elastic.watchdog"]
    arguments = [os.getpid(), os.getppid(), heartbeat.descriptor, hang_seconds, launcher, number]
    arguments += [line.port] if line else []
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.PIPE,  # closed with this process; takes the log's path before that
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[heartbeat.descriptor],
    )
    if line is not None:
        line.mute_after(process.pid)
    return process


class Clock:
    """Seconds of looks, of which each counts for `_LONGEST_LOOK_SECONDS` at most."""

    def __init__(self) -> None:
        self.now = 0.0
        self._seen = time.monotonic()

    def look(self) -> None:
        seen = time.monotonic()
        self.now += min(seen - self._seen, _LONGEST_LOOK_SECONDS)
        self._seen = seen


class Timer:
    """How long something has been so."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None

    def seconds(self, so: bool) -> float:
        """Seconds since `so` became true; 0 where it is not."""
        if not so:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = self._clock.now
        return self._clock.now - self._since


class HangDetector:
    """Decides whether a rank hangs, from what is seen of it from outside.

    Args:
        hang_seconds: 0 = a rank that does something is never taken for hung.
        reachable: whether the launcher answers; None where there is none to ask.
    """

    def __init__(self, hang_seconds: float, reachable: Callable[[], bool] | None) -> None:
        self._hang_seconds = hang_seconds
        self._reachable = reachable
        self._clock = clock = Clock()
        self._stopped, self._orphan, self._cut_off = Timer(clock), Timer(clock), Timer(clock)
        self._no_beat, self._idle = Timer(clock), Timer(clock)
        self._seen: tuple[int, int] = (-1, -1)  # beats, work
        self._scraps = 0  # of work, while the rank counts as idle

    def verdict(
        self, beats: int, activity: Activity, work: int, stopped: bool, orphan: bool
    ) -> str | None:
        """Why the rank has to be ended, or None.

        Args:
            beats, activity: of its heartbeat.
            work: what it has used of processor and disk, in ticks (see work.py).
            stopped: its state is "stopped".
            orphan: the process that started it is gone.
        """
        self._clock.look()
        if self._stopped.seconds(stopped) > _STOPPED_SECONDS:
            return f"stopped for {_STOPPED_SECONDS:.0f} s"
        if self._orphan.seconds(orphan) > _ORPHAN_SECONDS:
            return "its launcher is gone"
        asking = activity == Activity.RENDEZVOUS and self._reachable is not None
        if self._cut_off.seconds(asking and not self._reachable()) > _UNREACHABLE_SECONDS:  # type: ignore[misc]
            return f"its launcher was not reached for {_UNREACHABLE_SECONDS:.0f} s"
        judged = activity in _IDLE_FACTORS and self._hang_seconds > 0
        same = judged and beats == self._seen[0]
        worked = abs(work - self._seen[1])
        self._seen = (beats, work)
        hang = self._hang_seconds
        limit = _IDLE_FACTORS.get(activity, 1) * hang
        if activity == Activity.ENDING:
            limit = max(limit, _ENDING_SECONDS)
        self._scraps += worked if worked > _IDLE_TICKS else 0
        idle = same and self._scraps <= _SIDE_TICKS * limit
        if not idle:
            self._scraps = 0
        if self._idle.seconds(idle) > limit:
            return f"no progress, no work for {limit:.0f} s"
        busy, limit = same and activity != Activity.LOADING, max(limit, _BUSY_FACTOR * hang)
        if self._no_beat.seconds(busy) > limit:
            return f"busy without progress for {limit:.0f} s"
        return None


def main(arguments: list[str]) -> int:
    """Watches until the rank is gone, or ends it."""
    with threads_named(WATCHDOG):
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    if len(arguments) <= 6:
        return _watch(arguments)
    address, _, port = arguments[4].rpartition(":")
    line = Line(address, int(port), *map(int, arguments[5:]))
    tell = partial(ask, address, int(port), "alive", line.number, {})
    threading.Thread(target=line.beat_for_ever, args=(tell,), daemon=True).start()
    try:
        return _watch(arguments)
    finally:
        line.mute()


def _watch(arguments: list[str]) -> int:
    rank, parent, descriptor = map(int, arguments[:3])
    hang_seconds, launcher, number = float(arguments[3]), arguments[4], int(arguments[5])
    heartbeat = Heartbeat(descriptor)
    detector = HangDetector(hang_seconds, (lambda: _reachable(launcher)) if launcher else None)
    stacks: Path | None = None
    ticks = -1.0
    os.set_blocking(0, False)
    while True:
        time.sleep(_LOOK_SECONDS)
        try:
            text = _read_without_waiting()
            if text == b"":
                return 0
            if text:
                stacks = Path(text.decode().splitlines()[-1])
            process = psutil.Process(rank)
            beats, activity = heartbeat.read()
            # One that is stopped and continued by turns (cpulimit) uses processor in between.
            before, ticks = ticks, sum(process.cpu_times()[:2])
            reason = detector.verdict(
                beats,
                activity,
                work(rank),
                process.status() == psutil.STATUS_STOPPED and ticks == before,
                process.ppid() != parent,
            )
        except (psutil.Error, OSError):
            return 0
        if reason:
            end(process, f"{reason}, while {activity.name}", stacks, Launcher(launcher, number))
            os._exit(0)  # a thread of this process may hang with the rank


def _read_without_waiting() -> bytes | None:
    """What the rank has written since; b"" where it is gone, None where it wrote nothing."""
    try:
        return os.read(0, 4096)
    except BlockingIOError:
        return None


def _reachable(launcher: str) -> bool:
    address, _, port = launcher.rpartition(":")
    try:
        with socket.create_connection((address, int(port)), timeout=1.0):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
