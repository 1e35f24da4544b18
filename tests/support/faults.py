"""Injection of faults into a running job on a cluster."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.launch.commands import mpirun
from hvdtrain.run_files.events_file import read_lines
from hvdtrain.runtime.work import stat
from tests.support.cluster import REPOSITORY, Cluster, Process
from tests.support.job import Finished, Job
from tests.support.runs import metrics

# Linear regression with slow micro-batches: 0.1 s/step on 4 ranks.
PACED = (
    "--task tests.support.tasks:Paced --batch.global_size 8 --batch.micro_size 2 --eval.every 50"
    " --optim.name adamw --checkpoint.every 100 --telemetry.port 0"
)
START_SECONDS = 90
# Factor of the timeouts, because other clusters may run at the same time.
_TIMEOUT_FACTOR = 2.5


class TrainingJob:
    """A job of `PACED` on the hosts of a cluster, with its launcher on node1.

    Args:
        launcher: the argv before the rank's argv.
        directory: parent of its run directory.
        arguments: in addition to `PACED`; the later of two values counts.
        python: Python of a rank; default: `cluster.python`.

    Attributes:
        run: the run directory, as this process sees it.
    """

    def __init__(
        self,
        cluster: Cluster,
        launcher: Sequence[str],
        directory: Path,
        arguments: str,
        env: Mapping[str, str] | None,
        python: str | None = None,
    ) -> None:
        self.cluster = cluster
        self.run = directory / "case"
        train = (
            f"-m hvdtrain.train {PACED} --run.root {directory} --run.id case {arguments}".split()
        )
        self.job: Job = cluster.start("node1", [*launcher, python or cluster.python, *train], env)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far."""
        return metrics(self.run)

    def last(self) -> dict[str, Any]:
        """Return the last line; {} if there is none."""
        return (self.lines() or [{}])[-1]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [line for line in read_lines(self.run / "events.jsonl") if line["event"] == name]

    def wait_until(self, condition: Callable[[], bool], seconds: float, name: str) -> None:
        """Wait until the condition holds; the job must not end before."""
        deadline = time.monotonic() + _TIMEOUT_FACTOR * seconds
        while not condition():
            assert self.job.running(), f"ended before {name}: {self.job.wait(5)}"
            if time.monotonic() > deadline:
                where = positions(self.cluster)
                self.job.kill()
                done = self.job.wait(10)
                raise AssertionError(f"no {name} within {seconds} s: {done}\n{where}")
            time.sleep(0.05)

    def wait_for(self, what: Callable[[dict[str, Any]], bool], seconds: float, name: str) -> None:
        """Wait until the last line of metrics.jsonl satisfies the condition."""
        self.wait_until(lambda: bool(line := self.last()) and what(line), seconds, name)

    def wait_for_step(self, step: int, seconds: float = START_SECONDS) -> None:
        self.wait_for(lambda line: line["step"] >= step, seconds, f"step {step}")

    def wait_for_world(self, size: int, seconds: float) -> None:
        self.wait_for(lambda line: line["world_size"] == size, seconds, f"world of {size} ranks")

    def wait_for_start(self, after: float, seconds: float) -> dict[str, Any]:
        """Wait for the first step of a generation that began after `after` (unix); return its
        event."""

        def newest() -> dict[str, Any]:
            return self.events("start")[-1]

        self.wait_until(
            lambda: self.last().get("time", 0.0) > newest()["time"] > after,
            seconds,
            "step of a new round",
        )
        return newest()

    def wait_for_more(self, steps: int, seconds: float) -> None:
        self.wait_for_step(self.last()["step"] + steps, seconds)

    def launcher(self) -> Process:
        return next(p for p in self.cluster.processes("node1") if is_launcher(p.command))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        os.kill(self.launcher().pid, number)

    def ended(self, code: int, seconds: float = 120) -> Finished:
        """Wait for the end, with this exit code; the run must pass the audit."""
        done = self.job.wait(seconds)
        assert done.returncode == code, done
        assert_clean(self.run)
        return done

    def end(self) -> Finished:
        """Ask the launcher to stop; the job must end with 75 and a checkpoint."""
        self.send(signal.SIGUSR1)
        return self.ended(EXIT_PREEMPTED)


class MpiJob(TrainingJob):
    """A job under mpirun, with the same number of ranks on each host."""

    def __init__(
        self,
        cluster: Cluster,
        directory: Path,
        arguments: str = "",
        env: Mapping[str, str] | None = None,
        np: int = 4,
    ) -> None:
        exported = list(env or {})
        hosts = f"node1:{np // 2},node2:{np // 2}"
        launcher = mpirun(np, [], hosts=hosts, exported=exported)
        super().__init__(cluster, launcher, directory, arguments, env)


class ElasticJob(TrainingJob):
    """An elastic job under horovodrun, and the faults that can be injected.

    Args:
        directory: parent of its run directory and its list of hosts.
        hosts: "node1:2 node2:2"; written to the file that the discovery script prints.
        discovery: the script; default: prints that file.
        options: more options of horovodrun.
    """

    def __init__(
        self,
        cluster: Cluster,
        directory: Path,
        hosts: str = "node1:2 node2:2",
        np: int = 4,
        min_np: int = 1,
        arguments: str = "",
        discovery: str = "",
        options: str = "",
        env: Mapping[str, str] | None = None,
        python: str | None = None,
    ) -> None:
        self._hosts = directory / "hosts"
        self.set_hosts(hosts)
        launcher = f"horovodrun --gloo -np {np} --min-np {min_np} --max-np {max(6, np)}".split()
        launcher += ["--host-discovery-script", discovery or f"cat {self._hosts}"]
        launcher += options.split()
        super().__init__(cluster, launcher, directory, arguments, env, python)

    def process(self, number: int) -> Process:
        """Return the live process that was started as this number: rank `number` at first."""
        for process in self.cluster.ranks():
            try:
                own = psutil.Process(process.pid).environ().get("HOROVOD_RANK")
            except psutil.Error:
                continue
            if own == str(number):
                return process
        raise LookupError(f"no process has the number {number}")

    def numbers(self, host: str | None = None) -> list[int]:
        """Return the numbers of the live processes, on a host or on all hosts, in rank order."""
        found = []
        for process in self.cluster.ranks(host):
            with contextlib.suppress(psutil.Error):
                found.append(psutil.Process(process.pid).environ().get("HOROVOD_RANK", ""))
        return sorted(int(number) for number in found if number)

    def kill(self, *numbers: int) -> None:
        """Send SIGKILL to the processes that the launcher started as these numbers, at once."""
        self.cluster.kill([self.process(number) for number in numbers])

    def stop(self, number: int, watchdog: bool = False) -> None:
        """Stop a process, and its watchdog if `watchdog`, permanently with SIGSTOP."""
        process = psutil.Process(self.process(number).pid)
        for child in process.children() if watchdog else ():
            if "hvdtrain.elastic.watchdog" in child.cmdline():
                child.suspend()
        process.suspend()

    def kill_processes_of(self, host: str) -> None:
        """Kill all processes of the job on a host: ranks, watchdogs, guards, ssh sessions."""
        names = ("-m hvdtrain", "rank_guard.py")
        found = self.cluster.processes(host)
        self.cluster.kill(p for p in found if any(name in p.command for name in names))

    def set_hosts(self, hosts: str) -> None:
        """Set the hosts that discovery finds."""
        new = self._hosts.with_suffix(".new")
        new.write_text("".join(f"{host}\n" for host in hosts.split()))
        new.rename(self._hosts)


def positions(cluster: Cluster) -> str:
    """Where in the kernel each thread of the ranks and of their watchdogs is."""
    lines = []
    for rank in cluster.ranks():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(rank.pid)
            for each in (process, *process.children(recursive=True)):
                lines.append(f"{rank.host}: {each.pid}: {' '.join(each.cmdline()[:4])}")
                for thread in sorted(Path(f"/proc/{each.pid}/task").iterdir()):
                    name, (state, *_) = stat(thread)
                    lines.append(f"    {name}: {state} {(thread / 'wchan').read_text()}")
    return "\n".join(lines)


def is_launcher(command: str) -> bool:
    words = command.split()
    return words[:1] == ["mpirun"] or (len(words) > 1 and words[1].endswith("/horovodrun"))


def pause(lines: Sequence[Mapping[str, Any]], since: float) -> float:
    """Return the longest time in seconds between two steps that ended after `since` (unix)."""
    times = [line["time"] for line in lines]
    pairs = itertools.pairwise(times)
    return max(later - max(earlier, since) for earlier, later in pairs if later > since)


def assert_same_curve(
    lines: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]
) -> None:
    """Check that every step was done once, with the losses of an undisturbed run to 1e-4.

    Includes validation losses, which depend on BatchNorm's running statistics.
    """
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1)), "a gap or a double line"
    for line, expected in zip(lines, reference, strict=False):
        # The step in which the run was asked to stop is not evaluated.
        for name in {"loss", "validation_loss"} & expected.keys() & line.keys():
            wanted = expected[name]
            assert abs(line[name] - wanted) <= 1e-4 * abs(wanted) + 1e-9, (line, expected)


def assert_clean(run: Path) -> str:
    """Check that `hvdtrain audit` reports no problem; return its output."""
    command = [sys.executable, "-m", "hvdtrain.cli", "audit", str(run)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout
