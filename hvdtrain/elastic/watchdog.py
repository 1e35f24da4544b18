"""A process beside each rank that ends it when it hangs: a hung rank cannot do so itself.

The rank is killed, after what it was doing is written to RUN/logs, when

- it is stopped (SIGSTOP, a frozen terminal) for a second;
- it works on its own, but finishes nothing, and its main thread uses neither processor nor
  disk for `hang_seconds`; where it uses them, only after 10 times as long: a slow rank lives;
- it has no launcher any more: the process that started it is gone, or, while it waits for
  the launcher to say who takes part, the launcher cannot be reached.

What follows is the business of those who see the rank die: an elastic job goes on without
it, any other ends.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from hvdtrain.elastic.beats import Line
from hvdtrain.runtime.heartbeat import Doing, Heartbeat

_LOOK_SECONDS = 0.25
_STOPPED_SECONDS = 1.0
_UNREACHABLE_SECONDS = 6.0
_ORPHAN_SECONDS = 2.0
_BUSY_FACTOR = 10
_DUMP_SECONDS = 5.0
_IDLE_TICKS = 2  # of 10 ms: what a thread uses that wakes up to look and sleeps on


def start(
    heartbeat: Heartbeat, hang_seconds: float, launcher: str, line: Line | None
) -> subprocess.Popen[bytes]:
    """Starts the watchdog of this process; it ends with it.

    Args:
        hang_seconds: as elastic.hang_seconds.
        launcher: "address:port" of an elastic launcher, or "".
        line: on which it tells that launcher that this process lives.
    """
    command = [sys.executable, "-m", "hvdtrain.elastic.watchdog"]
    arguments = [os.getpid(), os.getppid(), heartbeat.descriptor, hang_seconds, launcher]
    arguments += [line.number, line.descriptor] if line else []
    descriptors = [heartbeat.descriptor, *([line.descriptor] if line else [])]
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.PIPE,  # closed with this process; takes the log's path before that
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
    )
    if line is not None:
        line.mute_after(process.pid)
    return process


def write_to(watchdog: subprocess.Popen[bytes], stacks: Path) -> None:
    """Tells the watchdog, and the rank's own fault handler, where stacks are to be written."""
    assert watchdog.stdin is not None
    watchdog.stdin.write(f"{stacks}\n".encode())
    watchdog.stdin.flush()
    file = open(stacks, "a")  # noqa: SIM115 - as long as the process lives
    faulthandler.register(signal.SIGQUIT, file=file, all_threads=True)


class Timer:
    """How long something has been so."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, so: bool) -> float:
        """Seconds since `so` became true; 0 where it is not."""
        if not so:
            self._since = None
            return 0.0
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since


class Judge:
    """Decides whether a rank hangs, from what is seen of it from outside.

    Args:
        hang_seconds: 0 = a rank that works is never taken for hung.
        reachable: whether the launcher answers; None where there is none to ask.
    """

    def __init__(self, hang_seconds: float, reachable: Callable[[], bool] | None) -> None:
        self._hang_seconds = hang_seconds
        self._reachable = reachable
        self._stopped, self._orphan, self._cut_off = Timer(), Timer(), Timer()
        self._no_beat, self._idle = Timer(), Timer()
        self._seen: tuple[int, int] = (-1, -1)  # beats, work

    def verdict(
        self, beats: int, doing: Doing, work: int, stopped: bool, orphan: bool
    ) -> str | None:
        """Why the rank has to be ended, or None.

        Args:
            beats, doing: of its heartbeat.
            work: what its main thread has used of processor and disk, in ticks.
            stopped: its state is "stopped".
            orphan: the process that started it is gone.
        """
        if self._stopped.seconds(stopped) > _STOPPED_SECONDS:
            return f"stopped for {_STOPPED_SECONDS:.0f} s"
        if self._orphan.seconds(orphan) > _ORPHAN_SECONDS:
            return "its launcher is gone"
        asking = doing == Doing.MEETING and self._reachable is not None
        if self._cut_off.seconds(asking and not self._reachable()) > _UNREACHABLE_SECONDS:  # type: ignore[misc]
            return f"its launcher was not reached for {_UNREACHABLE_SECONDS:.0f} s"
        working = doing == Doing.WORKING and self._hang_seconds > 0
        same = working and beats == self._seen[0]
        idle = same and work - self._seen[1] <= _IDLE_TICKS
        self._seen = (beats, work)
        if self._idle.seconds(idle) > self._hang_seconds:
            return f"no progress, no work for {self._hang_seconds:.0f} s"
        if self._no_beat.seconds(same) > _BUSY_FACTOR * self._hang_seconds:
            return f"busy without progress for {_BUSY_FACTOR * self._hang_seconds:.0f} s"
        return None


def main(arguments: list[str]) -> int:
    """Watches until the rank is gone, or ends it."""
    if len(arguments) <= 5:
        return _watch(arguments)
    address, _, port = arguments[4].rpartition(":")
    line = Line(address, int(port), *map(int, arguments[5:]))
    threading.Thread(target=line.beat_for_ever, daemon=True).start()
    try:
        return _watch(arguments)
    finally:
        line.mute()


def _watch(arguments: list[str]) -> int:
    rank, parent, descriptor = map(int, arguments[:3])
    hang_seconds, launcher = float(arguments[3]), arguments[4]
    heartbeat = Heartbeat(descriptor)
    judge = Judge(hang_seconds, (lambda: _reachable(launcher)) if launcher else None)
    stacks: Path | None = None
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
            beats, doing = heartbeat.read()
            reason = judge.verdict(
                beats,
                doing,
                _work(rank),
                process.status() == psutil.STATUS_STOPPED,
                process.ppid() != parent,
            )
        except (psutil.Error, OSError):
            return 0
        if reason:
            _end(process, reason, doing, stacks)
            return 0


def _read_without_waiting() -> bytes | None:
    """What the rank has written since; b"" where it is gone, None where it wrote nothing."""
    try:
        return os.read(0, 4096)
    except BlockingIOError:
        return None


def _work(pid: int) -> int:
    """Ticks of processor time that the main thread has used, and blocks that it has read or
    written (each counts as much as it takes to be no idling)."""
    stat = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(stat[11]) + int(stat[12])
    io = dict(
        line.split(": ")
        for line in Path(f"/proc/{pid}/task/{pid}/io").read_text().split("\n")
        if line
    )
    return ticks + (int(io["read_bytes"]) + int(io["write_bytes"])) // 4096


def _reachable(launcher: str) -> bool:
    address, _, port = launcher.rpartition(":")
    try:
        with socket.create_connection((address, int(port)), timeout=1.0):
            return True
    except OSError:
        return False


def _end(process: psutil.Process, reason: str, doing: Doing, stacks: Path | None) -> None:
    """Writes down where the rank hangs, as far as it can be seen, and kills it."""
    if stacks is not None:
        try:
            with open(stacks, "a") as file:
                file.write(_report(process, reason, doing))
            _dump(process, stacks)
        except (OSError, psutil.Error, subprocess.SubprocessError):
            pass  # a disk that hangs the rank may refuse this, too: the rank is ended all the same
    process.kill()


def _report(process: psutil.Process, reason: str, doing: Doing) -> str:
    lines = [f"\n{time.strftime('%F %T')} killed by its watchdog: {reason}, while {doing.name}"]
    for thread in process.threads():
        where = []
        for name in ("comm", "wchan", "syscall"):
            try:
                where.append(
                    Path(f"/proc/{process.pid}/task/{thread.id}/{name}").read_text().strip()
                )
            except OSError:
                where.append("?")
        lines.append(f"thread {thread.id}: {where[0]}, kernel {where[1]}, system call {where[2]}")
    return "\n".join(lines) + "\n"


def _dump(process: psutil.Process, stacks: Path) -> None:
    """The Python stack of every thread: py-spy's where it is installed, else the rank's own."""
    tool = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool:
        with open(stacks, "a") as file:
            command = [tool, "dump", "--nonblocking", "--pid", str(process.pid)]
            done = subprocess.run(command, stdout=file, stderr=file, timeout=_DUMP_SECONDS)
        if done.returncode == 0:
            return
    # A stopped process would have to go on for this, and might write what it must not.
    if process.status() != psutil.STATUS_STOPPED:
        process.send_signal(signal.SIGQUIT)  # faulthandler's; see write_to
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
