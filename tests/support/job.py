"""A command in the background, with its output in files and a timeout for every wait."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Finished:
    """End of a command; `seconds` is wall time, a negative `returncode` a signal."""

    argv: list[str]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"{' '.join(self.argv)}\nended with {self.returncode} after {self.seconds:.1f} s\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


class Job:
    """A running command.

    Output goes to files, not pipes: a grandchild that outlives the command would keep a pipe open,
    and tests read the output while it is written.
    """

    def __init__(
        self, prefix: Sequence[str], argv: Sequence[str], env: Mapping[str, str], output: Path
    ) -> None:
        """Start `prefix` + `argv`; only `argv` is reported. `output`: path of the files."""
        self.argv = list(argv)
        self._stdout = output.with_suffix(".stdout")
        self._stderr = output.with_suffix(".stderr")
        self._started = time.monotonic()
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*prefix, *argv],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def output(self) -> str:
        """Return all output so far, standard output first."""
        return _read(self._stdout) + _read(self._stderr)

    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout: float) -> Finished:
        """Wait for the end.

        Raises:
            AssertionError: it still runs after `timeout` seconds; it is killed, and the message
                contains its output.
        """
        try:
            returncode = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s: {self._finished(-9)}") from None
        return self._finished(returncode)

    def wait_for(self, text: str, timeout: float) -> float:
        """Wait until the output contains `text`; return the `time.monotonic()` at which it was
        seen.

        Raises:
            AssertionError: the command ended, or `timeout` seconds passed without it.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = not self.running()
            if text in self.output():
                return time.monotonic()
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} was not written: {self.output()}")
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command only; if it runs on another host, to the process that
        started it."""
        self._process.send_signal(number)

    def resume(self) -> None:
        """Resume nsenter after the command was stopped and continued: it stops too, but stays
        stopped."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the command and all of its descendants on its own host."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait(5)

    def _finished(self, returncode: int) -> Finished:
        seconds = time.monotonic() - self._started
        return Finished(self.argv, returncode, _read(self._stdout), _read(self._stderr), seconds)


def poll(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Wait until the condition holds; AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout} s without success for {what}")
        time.sleep(0.05)


def running_children(
    matches: Callable[[psutil.Process], bool], pid: int | None = None
) -> list[psutil.Process]:
    """Matching processes below process `pid` (default: this one) that have not ended.

    Some may end meanwhile, and other tests of this process may leave some that were not waited for.
    """
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and matches(process):
                found.append(process)
    return found


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not waited for it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _read(file: Path) -> str:
    return file.read_text(errors="replace")
