"""Watchdog process of each rank: kills the rank if it hangs, which a hung rank cannot do itself.

The watchdog writes the rank's stacks to RUN/logs and kills the rank when

- the rank is stopped (SIGSTOP, a frozen terminal) for a second;
- the rank works without waiting for others, completes nothing, and neither its threads (except
  Horovod's) nor its child processes use CPU or disk for `hang_seconds`. Up to 2 % of a core or
  8 kB/s counts as idle: a thread that samples or exports metrics uses that much. A busy rank,
  which may only be slow, is killed after 10 times as long. Before a rank takes part, no rank waits
  for it: it may be idle for 10 times as long, and busy without a limit. A rank that waits in a
  generation that is over is killed after 10 times as long, busy or not. A rank is not killed
  while the pipe or terminal of its output is not read (Ctrl-S, a pager): it may wait for that;
- its launcher is gone: the process that started the rank has ended, or the launcher cannot be
  reached while the rank waits for its next generation. Without an elastic launcher the rank is
  first asked to stop (SIGTERM): the ranks write a checkpoint and end.

A rank that is idle like this for 15 s is named before: in RUN/logs with its stacks, on its stderr
with the position in its code, and to its exporter (Heartbeat.stuck_seconds).

The watchdog reports the reason to an elastic launcher, and also if SIGKILL does not end the rank:
the kernel cannot end a process that waits for a dead disk. An elastic job then continues without
the rank; any other job ends.

Durations are measured on the watchdog's own clock, which stops while the job is suspended.
"""

from __future__ import annotations

import faulthandler
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from hvdtrain.agent.protocol import WATCHDOG as WATCHDOG_ROLE
from hvdtrain.agent.protocol import connect_to_agent
from hvdtrain.elastic.rendezvous import DriverAddress
from hvdtrain.log import logger
from hvdtrain.runtime.clock import Clock
from hvdtrain.runtime.heartbeat import Activity, Heartbeat
from hvdtrain.runtime.signals import blocked, is_caught
from hvdtrain.runtime.work import IDLE_TICKS, WATCHDOG, stat, threads_named, work
from hvdtrain.untrusted import printable

_LOOK_SECONDS = 0.25
_LONGEST_LOOK_SECONDS = 0.5  # a longer interval means that the job was suspended
_STOPPED_SECONDS = 1.0
_UNREACHABLE_SECONDS = 6.0
_ORPHAN_SECONDS = 2.0
_ORPHANED = "its launcher is gone"
_SAVE_SECONDS = 600.0  # at most, for orphans that are asked to stop
_BUSY_FACTOR = 10
_LOADING_FACTOR = 10
_LEAVING_FACTOR = 10  # it may wait for a thread with a deadline, such as that of a checkpoint
_IDLE_TICKS = IDLE_TICKS * _LOOK_SECONDS
# Work above _IDLE_TICKS in one look still counts as idle up to this average: threads that sample
# or export metrics continue while the rank hangs.
_SIDE_TICKS = 2  # per second
# Activities in which no other rank can end the wait -> hang_seconds for which a rank may be idle.
_IDLE_FACTORS = {
    Activity.LOADING: _LOADING_FACTOR,
    Activity.PREPARING: 1,
    Activity.WORKING: 1,
    Activity.ENDING: 1,
    Activity.LEAVING: _LEAVING_FACTOR,
}
IDLE = "no progress, no work"
# A rank that is idle for this long is named; at most half of the time after which it is killed.
_STUCK_SECONDS = 15.0
_OTHERS_WAIT = (Activity.PREPARING, Activity.WORKING)
_ENDING_SECONDS = 60.0  # at least: a rank limits its own end (train.py)


def start(
    heartbeat: Heartbeat, hang_seconds: float, launcher: str, number: int
) -> subprocess.Popen[bytes]:
    """Start the watchdog of this process; it ends with the process.

    Args:
        hang_seconds: as elastic.hang_seconds.
        launcher: "address:port" of an elastic launcher, or "".
        number: the launcher's number of this process.
    """
    command = [sys.executable, "-m", "hvdtrain.elastic.watchdog"]
    arguments = [os.getpid(), os.getppid(), heartbeat.descriptor, hang_seconds, launcher, number]
    with blocked():  # as long as it runs: it ends with its rank
        return subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=subprocess.PIPE,  # receives the path for stacks; closed when this process ends
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,  # read when it has died, see KeptWatchdog
            pass_fds=[heartbeat.descriptor],
        )


class Timer:
    """Measures how long a condition has been true."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None

    def seconds(self, so: bool) -> float:
        """Return the seconds since `so` became true; 0 if it is false."""
        if not so:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = self._clock.now
        return self._clock.now - self._since


class HangDetector:
    """Decides from outside a rank whether it hangs.

    Attributes:
        stuck_seconds: for which a rank that takes part has been idle; 0: it is not stuck yet.

    Args:
        hang_seconds: 0 = a rank that is not stopped is never classified as hung.
        reachable: whether the launcher responds; None without an elastic launcher.
        unreachable_seconds: for which the launcher may be unreachable; None: 6.
    """

    def __init__(
        self,
        hang_seconds: float,
        reachable: Callable[[], bool] | None,
        unreachable_seconds: float | None = None,
    ) -> None:
        self._hang_seconds = hang_seconds
        self._reachable, self._unreachable_seconds = reachable, unreachable_seconds
        self._clock = clock = Clock(_LONGEST_LOOK_SECONDS)
        self._stopped, self._orphan, self._cut_off = Timer(clock), Timer(clock), Timer(clock)
        self._no_beat, self._idle = Timer(clock), Timer(clock)
        self._seen: tuple[int, int] = (-1, -1)  # beats, work
        self._scraps = 0  # of work, while the rank counts as idle
        self.stuck_seconds = 0.0

    def verdict(
        self, beats: int, activity: Activity, work: int, stopped: bool, orphan: bool
    ) -> str | None:
        """Return why the rank has to be ended, or None.

        Args:
            beats, activity: of its heartbeat.
            work: CPU and disk use so far, in ticks (see work.py).
            stopped: its state is "stopped".
            orphan: the process that started it is gone.
        """
        self._clock.look()
        if self._stopped.seconds(stopped) > _STOPPED_SECONDS:
            return f"stopped for {_STOPPED_SECONDS:.0f} s"
        if self._orphan.seconds(orphan) > _ORPHAN_SECONDS:
            return _ORPHANED
        limit = self._unreachable_seconds or _UNREACHABLE_SECONDS
        asking = activity == Activity.RENDEZVOUS and self._reachable is not None
        if self._cut_off.seconds(asking and not self._reachable()) > limit:  # type: ignore[misc]
            return f"its launcher was not reached for {limit:.0f} s"
        checked = activity in _IDLE_FACTORS and self._hang_seconds > 0
        same = checked and beats == self._seen[0]
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
        seconds = self._idle.seconds(idle)
        stuck = activity in _OTHERS_WAIT and seconds > min(_STUCK_SECONDS, limit / 2)
        self.stuck_seconds = seconds if stuck else 0.0
        if seconds > limit:
            return f"{IDLE} for {limit:.0f} s"
        busy, limit = same and activity != Activity.LOADING, max(limit, _BUSY_FACTOR * hang)
        if self._no_beat.seconds(busy) > limit:
            return f"busy without progress for {limit:.0f} s"
        return None


def main(arguments: list[str]) -> int:
    """Watch the rank until it is gone or has to be ended."""
    driver, number = _driver(arguments[4]), int(arguments[5])
    with threads_named(WATCHDOG), ExitStack() as kept:
        if driver is not None:
            with suppress(OSError):  # the agent continues this process if it is stopped
                kept.enter_context(connect_to_agent(WATCHDOG_ROLE))
        return _watch(arguments, driver, number)


def _watch(arguments: list[str], driver: DriverAddress | None, number: int) -> int:
    rank, parent, descriptor = map(int, arguments[:3])
    hang_seconds = float(arguments[3])
    heartbeat = Heartbeat(descriptor)
    reachable, limit = (driver.reachable, driver.timeout) if driver else (None, None)
    detector = HangDetector(hang_seconds, reachable, limit)
    stacks: Path | None = None
    ticks, unread, named = -1.0, False, False
    asked_at: float | None = None
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
            # A process that is repeatedly stopped and continued (cpulimit) uses CPU in between.
            before, ticks = ticks, sum(process.cpu_times()[:2])
            reason = detector.verdict(
                beats,
                activity,
                work(rank),
                process.status() == psutil.STATUS_STOPPED and ticks == before,
                process.ppid() != parent and asked_at is None,
            )
        except (psutil.Error, OSError):
            return 0
        if reason == _ORPHANED and driver is None:
            if not heartbeat.stopping:  # it would take another signal for a second request
                process.send_signal(signal.SIGTERM)
            asked_at = time.monotonic()
            _note_later(stacks, f"asked to stop: {reason}")
            continue
        if asked_at is not None and time.monotonic() - asked_at > _SAVE_SECONDS:
            reason = _ORPHANED
        heartbeat.stuck_seconds = stuck = detector.stuck_seconds
        if stuck and not named and not _waits_for_a_reader(rank):
            named = True
            who = f"{'process' if driver else 'rank'} {number} on {socket.gethostname()}"
            what = f"{IDLE} for {stuck:.0f} s (killed after {hang_seconds:g} s), "
            what += f"while {activity.name}"
            naming = partial(_name, process, who, what, stacks)
            threading.Thread(target=naming, daemon=True).start()  # the disk may not respond
        named &= stuck > 0
        if reason and reason.startswith(IDLE) and _waits_for_a_reader(rank):
            if not unread:
                _note_later(stacks, f"not killed: {reason}, but its output is not read")
            unread = True
        elif reason:
            notify = partial(_notify, driver, number)
            end(process, f"{reason}, while {activity.name}", stacks, notify)
            os._exit(0)  # a thread of this process may hang with the rank


def _waits_for_a_reader(rank: int) -> bool:
    """Whether a write to the rank's stdout or stderr would wait for whoever reads it."""
    return any(_is_full(f"/proc/{rank}/fd/{number}") for number in (1, 2))


_READ_OUTPUTS = ("pipe:", "/dev/pts/", "/dev/tty")


def _is_full(output: str) -> bool:
    with _opened(output) as opened:
        if opened is None:
            return False
        poll = select.poll()
        poll.register(opened, select.POLLOUT)
        return not poll.poll(0)


def _write(output: str, text: str) -> None:
    with _opened(output) as opened, suppress(OSError):
        if opened is not None:
            os.write(opened, text.encode())


@contextmanager
def _opened(output: str) -> Iterator[int | None]:
    """Open a pipe or terminal of another process without waiting; None: it is something else."""
    try:
        if not os.readlink(output).startswith(_READ_OUTPUTS):
            raise FileNotFoundError  # to open a file on a dead disk would take for ever
        opened = os.open(output, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        yield None
        return
    try:
        yield opened
    finally:
        os.close(opened)


def _read_without_waiting() -> bytes | None:
    """Read new input from the rank; b"" if the rank is gone, None if it wrote nothing."""
    try:
        return os.read(0, 4096)
    except BlockingIOError:
        return None


def _driver(launcher: str) -> DriverAddress | None:
    address, _, port = launcher.rpartition(":")
    return DriverAddress(address, int(port)) if port else None


# Handling of a hung rank by its watchdog: report to the launcher, write stacks, kill.


_DUMP_SECONDS = 5.0
_WRITE_SECONDS = 1.0  # a disk that blocks the rank may block this write, too
_REPORT_SECONDS = 8.0
_KILL_SECONDS = 2.0  # the kernel needs less if it can end the process at all
_NOTIFY_SECONDS = 20.0


def _notify(
    driver: DriverAddress | None, number: int, what: str, message: str, seconds: float
) -> None:
    """Send a message to the elastic launcher, if there is one; retry for `seconds`."""
    deadline = time.monotonic() + seconds
    while driver is not None:
        try:
            driver.ask(what, number, {"message": message})
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.5)


def end(
    process: psutil.Process,
    reason: str,
    stacks: Path | None,
    notify: Callable[[str, str, float], None],
) -> None:
    """Write to `stacks` where the rank hangs, as far as that is visible, and kill the rank."""
    notify("failed", f"killed by its watchdog: {reason}", 0.0)
    if stacks is not None:
        begun = threading.Event()
        arguments = (process, f"killed by its watchdog: {reason}", stacks, begun)
        writing = threading.Thread(target=_report, args=arguments, daemon=True)
        writing.start()
        if begun.wait(_WRITE_SECONDS):
            writing.join(_REPORT_SECONDS)
    process.kill()
    deadline = time.monotonic() + _KILL_SECONDS
    while _lives(process.pid):
        if time.monotonic() > deadline:
            where = _where(process)
            notify("stuck", f"SIGKILL does not end it ({where})", _NOTIFY_SECONDS)
            return
        time.sleep(0.05)


def _name(process: psutil.Process, who: str, text: str, stacks: Path | None) -> None:
    """Write the stacks of a rank that is stuck, and say on its stderr where it is."""
    dumped: list[str] = []
    if stacks is not None:
        dumping = threading.Thread(target=_stuck, args=(process, text, stacks, dumped), daemon=True)
        dumping.start()
        dumping.join(_REPORT_SECONDS)
    where = f"; it is in {dumped[0]}, see {stacks}" if dumped else ""
    _write(f"/proc/{process.pid}/fd/2", f"hvdtrain: warning: {who}: {text}{where}\n")


def _stuck(process: psutil.Process, text: str, stacks: Path, position: list[str]) -> None:
    with suppress(OSError):
        begin = stacks.stat().st_size if stacks.exists() else 0
        _report(process, text, stacks, threading.Event())
        position += _positions(stacks.read_bytes()[begin:].decode(errors="replace"))


# The innermost frame of the main thread: py-spy names the thread, the fault handler puts it last.
_FRAMES = (
    r'"MainThread"\n\s+(?P<function>\S+) \((?P<file>\S+):(?P<line>\d+)\)',
    r'recent call first\):\n\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>\S+)',
)


def _positions(text: str) -> list[str]:
    for pattern in _FRAMES:
        if frames := list(re.finditer(pattern, text)):
            return [printable("{function} ({file}:{line})".format(**frames[-1].groupdict()))]
    return []


def _lives(pid: int) -> bool:
    """Whether any thread is alive: the process may be a zombie while a thread waits for a disk."""
    states = set()
    with suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # this thread has ended; another may still wait
                states.add(stat(thread)[1][0])
    return not states <= {"Z", "X"}


def _report(process: psutil.Process, text: str, stacks: Path, begun: threading.Event) -> None:
    with suppress(OSError, psutil.Error, subprocess.SubprocessError):
        _note(stacks, f"{text}\n" + _where(process).replace("; ", "\n"))
        begun.set()
        _dump(process, stacks)


def _note(stacks: Path | None, text: str) -> None:
    if stacks is not None:
        with suppress(OSError), open(stacks, "a") as file:
            file.write(f"\n{time.strftime('%F %T')} {text}\n")


def _note_later(stacks: Path | None, text: str) -> None:
    """Do the same in a thread: the disk may not respond."""
    threading.Thread(target=_note, args=(stacks, text), daemon=True).start()


def _where(process: psutil.Process) -> str:
    """Position of each thread in the kernel."""
    threads = []
    for thread in sorted(Path(f"/proc/{process.pid}/task").iterdir()):
        where = []
        for name in ("comm", "wchan", "syscall"):
            try:
                where.append((thread / name).read_text().strip())
            except OSError:
                where.append("?")
        threads.append(f"thread {thread.name}: {where[0]}, kernel {where[1]}, call {where[2]}")
    return "; ".join(threads)


def _dump(process: psutil.Process, stacks: Path) -> None:
    """Write all Python stacks, by py-spy if it is installed, else by the rank's faulthandler."""
    tool = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool:
        with open(stacks, "a") as file:
            command = [tool, "dump", "--nonblocking", "--pid", str(process.pid)]
            done = subprocess.run(command, stdout=file, stderr=file, timeout=_DUMP_SECONDS)
        if done.returncode == 0:
            return
    # A stopped process would have to continue for this, and might write what it must not. Without
    # faulthandler's handler, see KeptWatchdog below, the signal would end the process.
    if process.status() != psutil.STATUS_STOPPED and is_caught(signal.SIGQUIT, process.pid):
        process.send_signal(signal.SIGQUIT)
        time.sleep(1)


# --- a rank's handle of its watchdog ------------------------------------------


_RESTART_SECONDS = (0.5, 60.0)  # after a watchdog's first end; longest pause
_REPORTED_ENDS = 3  # of a watchdog, after which the reason is reported
_ERROR_BYTES = 1 << 16  # more than a traceback has


class KeptWatchdog:
    """A watchdog that is restarted whenever it ends, with a warning the first time.

    Args:
        start: starts a watchdog.
    """

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._start = start
        self._stacks: Path | None = None
        self._lock = threading.Lock()
        self._process = start()
        os.register_at_fork(after_in_child=partial(faulthandler.unregister, signal.SIGQUIT))
        threading.Thread(target=self._keep, name="watchdog", daemon=True).start()

    def write_to(self, stacks: Path) -> None:
        """Set the file for stacks in the watchdog and in the rank's own fault handler.

        If the file cannot be written, training continues without stacks.
        """
        with self._lock:
            self._stacks = stacks
            self._send_path()
        with suppress(OSError):
            file = open(stacks, "a")  # noqa: SIM115 - as long as the process lives
            faulthandler.register(signal.SIGQUIT, file=file, all_threads=True)

    def _send_path(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has died: its successor receives the path
            self._process.stdin.write(f"{self._stacks}\n".encode())
            self._process.stdin.flush()

    def _last_error(self) -> str:
        """Return the last line that the watchdog has printed."""
        if (file := self._process.stderr) is None:
            return ""
        with file, suppress(OSError):  # what it has started may keep the pipe open
            os.set_blocking(file.fileno(), False)
            lines = os.read(file.fileno(), _ERROR_BYTES).decode(errors="replace").split("\n")
            return next((printable(line) for line in reversed(lines) if line.strip()), "")
        return ""

    def _keep(self) -> None:
        pause = _RESTART_SECONDS[0]
        ends = 0
        while True:
            code, ends = self._process.wait(), ends + 1
            if ends == 1:
                logger.warning("this rank's watchdog ended (%s); it is started again", code)
            elif ends == _REPORTED_ENDS:
                logger.warning(
                    "this rank's watchdog has ended %d times, so a hang may stay unnoticed: %s",
                    ends,
                    self._last_error() or code,
                )
            time.sleep(pause)
            pause = min(2 * pause, _RESTART_SECONDS[1])
            with self._lock, suppress(OSError):  # currently no memory for it
                self._process = self._start()
                if self._stacks is not None:
                    self._send_path()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
