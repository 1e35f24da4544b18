"""A real training job under its launcher, controlled from outside: frozen, killed, inspected.

Jobs that are compared take turns: while one trains, the others are frozen.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.bench.processes import BenchError
from hvdtrain.run_files.events_file import read_lines
from hvdtrain.run_files.run_directory import RunDirectory

RANK = ["-m", "hvdtrain.train"]
_RUN = "bench"
_WAIT_S = 300.0
_END_S = 20.0
# Timeout of a collective; frozen ranks do not respond for a while.
_COLLECTIVE_TIMEOUT_S = 600
# Omit what is not part of a plain step; two concurrent jobs cannot serve on one port.
_FLAGS = (
    "--eval.every=0",
    "--checkpoint.every=0",
    "--telemetry.port=0",
    "--train.duration=1000000",
)


def train(python: str, flags: Sequence[str], root: Path) -> list[str]:
    """Command line of a rank that trains forever; its run directory is in `root`."""
    return [python, *RANK, *_FLAGS, *flags, f"--run.root={root}", f"--run.id={_RUN}"]


class ControlledJob:
    """A job that runs inside the `with` block.

    Args:
        argv: a launcher's command line that starts `train`.
        root: the directory that was passed to `train`.
        patient: collectives never time out, so the job may be frozen.
    """

    def __init__(self, argv: Sequence[str], root: Path, patient: bool = False) -> None:
        self._argv = list(argv)
        self._directory = RunDirectory(root / _RUN)
        self.targets = self._directory.targets
        self._log = root / "output"
        self._env = {"OMP_NUM_THREADS": "1"} | os.environ
        if patient:
            self._env["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(_COLLECTIVE_TIMEOUT_S)
        self._suspended: set[psutil.Process] = set()
        self._read = 0  # bytes of metrics.jsonl
        self._lines: list[dict[str, Any]] = []

    def __enter__(self) -> ControlledJob:
        with self._log.open("wb") as log:
            try:
                self._launcher = psutil.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    start_new_session=True,
                )
            except OSError as error:
                raise BenchError(f"cannot start {self._argv[0]}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        """Interrupt the launcher, which ends the ranks on all hosts at once; then kill the rest."""
        self.thaw()
        processes = self._tree()
        with suppress(psutil.NoSuchProcess):
            self._launcher.send_signal(signal.SIGINT)
        for process in psutil.wait_procs(processes, _END_S)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._launcher.wait(_END_S)

    def freeze(self) -> None:
        """Stop all processes of the job on this host, so that it uses no CPU time.

        A rank's watchdog is stopped before the rank, because it would treat a stopped rank as hung.
        """
        for process in reversed(self._tree()):
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        """Undo `freeze`."""
        for process in set(self._tree()) - self._suspended:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def suspend_watchdogs(self) -> None:
        """Permanently stop the watchdogs of this host's ranks; the ranks continue to train.

        A watchdog that ends would be restarted.
        """
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                if "hvdtrain.elastic.watchdog" in process.cmdline():
                    process.suspend()
                    self._suspended.add(process)

    def seconds_outside_ranks(self) -> float:
        """CPU seconds of the launcher, the watchdogs and their child processes."""
        ranks = self._ranks().values()
        return _seconds(process for process in self._tree() if process not in ranks)

    def cpu_seconds(self) -> float:
        """CPU seconds of all processes of the job on this host."""
        return _seconds(self._tree())

    def kill_one(self) -> None:
        """Send SIGKILL to this host's rank with the second-lowest number, or to its only rank.

        Raises:
            BenchError: there is no rank on this host.
        """
        ranks = self._ranks()
        if not ranks:
            raise BenchError("no rank to kill on this host")
        numbers = sorted(ranks)
        ranks[numbers[min(1, len(numbers) - 1)]].kill()

    def lines(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl so far, without a line that is being written."""
        if self._directory.metrics.exists():
            with self._directory.metrics.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            self._lines += map(json.loads, whole.splitlines())
        return self._lines

    def events(self) -> list[dict[str, Any]]:
        """Events of events.jsonl so far."""
        return list(read_lines(self._directory.events))

    def wait_for(self, condition: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
        """Wait until the lines so far satisfy `condition`.

        Raises:
            BenchError: the job ended, or the condition was not met within 5 minutes.
        """
        deadline = time.monotonic() + _WAIT_S
        while not condition(self.lines()):
            code = self._launcher.poll()
            if code is not None or time.monotonic() > deadline:
                how = "took too long" if code is None else f"ended with {code}"
                output = self._log.read_text(errors="replace").splitlines()
                end = "\n".join(line for line in output[-15:] if line.strip())
                command = " ".join(self._argv)
                raise BenchError(f"{command} {how} before {what}:\n{end}", code or 1)
            time.sleep(0.02)

    def wait_for_more(self, steps: int) -> None:
        """Wait for `steps` more steps; raises as `wait_for`."""
        wanted = len(self.lines()) + steps
        self.wait_for(lambda lines: len(lines) >= wanted, f"step {wanted}")

    def _ranks(self) -> dict[int, psutil.Process]:
        """The ranks of this host, by their number at the start."""
        ranks = {}
        for process in self._tree():
            with suppress(psutil.Error):
                if process.cmdline()[1:3] == RANK:
                    ranks[int(process.environ()["HOROVOD_RANK"])] = process
        return ranks

    def _tree(self) -> list[psutil.Process]:
        """The launcher and its descendants on this host, parents before children."""
        try:
            return [self._launcher, *self._launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return [self._launcher]


def _seconds(processes: Iterable[psutil.Process]) -> float:
    """CPU time, including children that have ended."""
    seconds = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


@dataclass(frozen=True)
class JobTurn:
    """One turn of a job.

    Args:
        step: seconds per step.
        awake: seconds for which the job was not frozen.
        end: time at which the job was frozen.
        cpu: CPU seconds of all processes of the job on this host.
    """

    step: float
    awake: float
    end: float
    cpu: float


def take_turns(
    jobs: Mapping[str, ControlledJob], steps: int, rounds: int
) -> dict[str, list[JobTurn]]:
    """Run every job for `steps` steps in each round, alternating the order.

    Args:
        jobs: jobs by name; they are frozen before and after.
    """
    turns: dict[str, list[JobTurn]] = {name: [] for name in jobs}
    for number in range(rounds):
        for name in sorted(jobs, reverse=number % 2 == 1):
            turns[name].append(_one_turn(jobs[name], steps))
    return turns


def _one_turn(job: ControlledJob, steps: int) -> JobTurn:
    """Run one turn, ignoring the step in which the job was last frozen."""
    used = job.cpu_seconds()
    start = time.monotonic()
    job.thaw()
    seconds = seconds_per_step(job, steps)
    job.freeze()
    awake, end = time.monotonic() - start, time.time()
    return JobTurn(seconds, awake, end, job.cpu_seconds() - used)


def seconds_per_step(job: ControlledJob, steps: int) -> float:
    """Seconds per step over the next steps of a training job, after one step that is ignored.

    Lines of earlier steps may be written later: short steps have one write together.
    """
    begin = time.time()
    earlier = len(job.lines())

    def times() -> list[float]:
        return [line["time"] for line in job.lines()[earlier:] if line["time"] > begin]

    job.wait_for(lambda _: len(times()) > steps, f"{steps} more steps")
    first, *_, last = times()[: steps + 1]
    return (last - first) / steps


def cpu_per_step(job: ControlledJob, turns: Sequence[JobTurn]) -> list[float]:
    """CPU seconds per step in each turn of a frozen job, including those outside the ranks."""
    job.thaw()
    job.wait_for_more(1)  # also writes the lines of the last turn
    job.freeze()
    times = [line["time"] for line in job.lines()]
    steps = [bisect(times, turn.end) - bisect(times, turn.end - turn.awake) for turn in turns]
    return [turn.cpu / number for turn, number in zip(turns, steps, strict=True)]


def step_time_ratios(turns: Mapping[str, Sequence[JobTurn]], one: str, other: str) -> list[float]:
    """Ratio of the seconds per step, round by round."""
    return [a.step / b.step for a, b in zip(turns[one], turns[other], strict=True)]


def median_range(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median of the distribution of `values`.

    Uses order statistics (David and Nagaraja, Order Statistics, 7.1) in the normal approximation of
    the binomial; no distribution is assumed.
    """
    ordered, count = sorted(values), len(values)
    reach = 1.96 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach) - 1)
    high = min(count - 1, math.ceil(count / 2 + reach))
    return ordered[low], ordered[high]
