"""Handling of a hung rank by its watchdog: report to the launcher, write stacks, kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from hvdtrain.elastic.rendezvous import ask

_DUMP_SECONDS = 5.0
_WRITE_SECONDS = 1.0  # a disk that blocks the rank may block this write, too
_REPORT_SECONDS = 8.0
_KILL_SECONDS = 2.0  # the kernel needs less if it can end the process at all
_TELL_SECONDS = 20.0


class Launcher:
    """Client of the elastic launcher in a watchdog; does nothing if `address` is ""."""

    def __init__(self, address: str, number: int) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port or 0)
        self._number = number

    def tell(self, what: str, message: str, seconds: float) -> None:
        """Send a message; retry for `seconds`."""
        deadline = time.monotonic() + seconds
        while self._port:
            try:
                ask(self._host, self._port, what, self._number, {"message": message})
                return
            except OSError:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.5)


def end(process: psutil.Process, reason: str, stacks: Path | None, launcher: Launcher) -> None:
    """Write to `stacks` where the rank hangs, as far as that is visible, and kill the rank."""
    launcher.tell("failed", f"killed by its watchdog: {reason}", 0.0)
    if stacks is not None:
        begun = threading.Event()
        arguments = (process, reason, stacks, begun)
        writing = threading.Thread(target=_report, args=arguments, daemon=True)
        writing.start()
        if begun.wait(_WRITE_SECONDS):
            writing.join(_REPORT_SECONDS)
    process.kill()
    deadline = time.monotonic() + _KILL_SECONDS
    while _lives(process.pid):
        if time.monotonic() > deadline:
            where = _where(process)
            launcher.tell("stuck", f"SIGKILL does not end it ({where})", _TELL_SECONDS)
            return
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    """Whether any thread is alive: the process may be a zombie while a thread waits for a disk."""
    try:
        states = [
            (thread / "stat").read_text().rpartition(")")[2].split()[0]
            for thread in Path(f"/proc/{pid}/task").iterdir()
        ]
    except OSError:
        return False
    return not set(states) <= {"Z", "X"}


def _report(process: psutil.Process, reason: str, stacks: Path, begun: threading.Event) -> None:
    with suppress(OSError, psutil.Error, subprocess.SubprocessError):
        with open(stacks, "a") as file:
            file.write(f"\n{time.strftime('%F %T')} killed by its watchdog: {reason}\n")
            file.write(_where(process).replace("; ", "\n") + "\n")
        begun.set()
        _dump(process, stacks)


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
    # A stopped process would have to continue for this, and might write what it must not.
    if process.status() != psutil.STATUS_STOPPED:
        process.send_signal(signal.SIGQUIT)  # handled by faulthandler, see kept_watchdog.py
        time.sleep(1)
