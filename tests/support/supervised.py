"""A run under `hvdtrain launch` on two hosts, and checks after a fault."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.run_files.host_records import read_incidents
from tests.support import runs as local
from tests.support.cluster import Cluster
from tests.support.job import Finished, Job, poll

# More steps than are done before the last test, which does the remaining ones quickly.
STEPS = 900
EVERY = 20
# Most of it is the start of the ranks, which takes longer on a slower machine: 8 to 14 s alone;
# here another test may start its ranks at the same time.
RECOVERY_SECONDS = 30
RECOVERY_STARTS = 2.5
# Time to start all ranks twice on a busy machine, and for the steps.
TEST_SECONDS = 150
COMMON = [
    *("--train.duration", str(STEPS), "--checkpoint.every", str(EVERY), "--eval.every", "0"),
    # The same for each rank: under MPI, a rank that waits for another polls.
    *("--batch.global_size", "3", "--batch.micro_size", "1", "--telemetry.port", "0"),
    # Slow enough that the loss does not become as small as rounding errors.
    *("--optim.lr", "0.001"),
]

# The lost host has more than one rank; the other ranks only cost time.
HOSTS = "--hosts node1:1,node2:2"
ALL = 3
SLOW = "--task tests.support.tasks:Slow"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HVDTRAIN_TEST_PACE": "0.1"}
# Three of the supervisor's reads of the run's files, a second apart, and some margin.
PACE_SECONDS = 4.0
NO_PACE = {"HVDTRAIN_TEST_PACE": "0"}

Record = Callable[[str, object], None]


class Supervised:
    """A supervised run on node1 and node2; its first supervisor is on node1.

    Attributes:
        run: its run directory.
        job: the supervisor that was started last.
        host: the supervisor's host.
    """

    def __init__(
        self,
        cluster: Cluster,
        root: Path,
        options: str = HOSTS,
        task: str = SLOW,
        env: Mapping[str, str] | None = None,
        name: str = "case",
    ) -> None:
        self.cluster, self.run = cluster, root / name
        self._options, self._train = options.split(), [*COMMON, *task.split()]
        self._train += ["--run.root", str(root), "--run.id", name]
        self.first_start = 0.0  # seconds from the command to its first step
        self.job = self.start(env=env)

    def start(
        self, host: str = "node1", more: str = "", env: Mapping[str, str] | None = None
    ) -> Job:
        """Start a supervisor; `more` are additional options."""
        launch = ["python", "-m", "hvdtrain.cli", "launch", *self._options, *more.split()]
        self.started_at, self.host = time.time(), host
        train = [self.cluster.forked, "python", "-m", "hvdtrain.train", *self._train]
        argv = [*launch, "--", *train]
        self.job = self.cluster.start(host, argv, ENVIRONMENT | dict(env or {}))
        return self.job

    def lines(self) -> list[dict[str, Any]]:
        return local.metrics(self.run)

    def last(self) -> dict[str, Any]:
        """Return the last line; step 0 if there is none."""
        return (self.lines() or [{"step": 0, "time": 0.0, "world_size": 0}])[-1]

    def starts(self) -> list[dict[str, Any]]:
        return list(json.loads((self.run / "manifest.json").read_text())["starts"])

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        def reached() -> bool:
            assert self.job.running(), self.job.output()
            return bool(self.last()["step"] >= step)

        poll(reached, timeout, f"step {step}: {self.job.output()}")
        self.first_start = self.first_start or self.lines()[0]["time"] - self.started_at

    def train_on(self, ranks: int) -> None:
        """Wait for this many ranks, and for a step in the middle between two checkpoints.

        By then the supervisor has measured this start's step times.
        """

        def trains() -> bool:
            assert self.job.running(), self.job.output()
            last = self.last()
            if last["time"] < self.started_at or last["world_size"] != ranks:
                return False
            start = self.starts()[-1]["time"]
            first = next((line["time"] for line in self.lines() if line["time"] > start), math.inf)
            if last["time"] - first < PACE_SECONDS:
                return False
            return EVERY / 2 <= last["step"] % EVERY < EVERY * 3 / 4

        poll(trains, 120, f"{ranks} ranks: {self.job.output()}")
        self.first_start = self.first_start or self.lines()[0]["time"] - self.started_at

    def recovery(self, fault_at: float) -> tuple[float, int]:
        """Return the seconds from the fault to the next start's first line, and repeated steps."""
        poll(lambda: self.starts()[-1]["time"] > fault_at, 60, f"a start: {self.job.output()}")
        start = self.starts()[-1]

        poll(lambda: self.last()["time"] > start["time"], 60, f"a step: {self.job.output()}")
        first = next(line["time"] for line in self.lines() if line["time"] > start["time"])
        return first - fault_at, self.steps_again(fault_at)

    def steps_again(self, fault_at: float) -> int:
        """Return the number of steps that were repeated after the fault."""
        last, start = next(
            pair for pair in itertools.pairwise(self.starts()) if pair[1]["time"] > fault_at
        )
        path = self.run / "left_metrics.jsonl"  # missing if all ranks could save
        left = path.read_text().splitlines() if path.exists() else []
        lost = [json.loads(line) for line in left if line.endswith("}")]
        lost = [line for line in lost if last["time"] < line["time"] < start["time"]]
        return sum(line["step"] > start["step"] for line in lost)

    def check_recovery(self, seconds: float, lost: int, record: Record) -> None:
        """Check the recovery time against the first start, and that at most the steps since a
        checkpoint were lost."""
        record("recovery_seconds", round(seconds, 1))
        record("steps_again", lost)
        assert lost <= EVERY, f"{lost} steps were done again: {self.job.output()}"
        limit = max(RECOVERY_SECONDS, RECOVERY_STARTS * self.first_start)
        assert seconds <= limit, f"{seconds:.1f} s, not {limit:.1f}: {self.job.output()}"

    def finish(self, undisturbed: list[float]) -> Finished:
        """Start it again, without a pause in any step: it does the remaining steps and exits with
        0."""
        done = self.start(env=NO_PACE).wait(TEST_SECONDS)
        assert done.returncode == 0, done
        self.check_curve(undisturbed)
        assert self.last()["step"] == len(undisturbed)
        return done

    def check_curve(self, undisturbed: list[float]) -> None:
        """Check that each step so far was done once, with the losses of the undisturbed run."""
        lines = self.lines()
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        assert [line["loss"] for line in lines] == pytest.approx(
            undisturbed[: len(lines)], rel=1e-4
        )

    def interrupt(self) -> Finished:
        """Interrupt it, as Ctrl-C does."""
        os.kill(self.supervisor(), signal.SIGINT)
        return self.job.wait(15)

    def world_sizes(self, since: float) -> list[int]:
        """Return the world sizes of the starts after a time."""
        return [start["world_size"] for start in self.starts() if start["time"] > since]

    def incidents(self, since: float) -> list[tuple[str, str]]:
        """Return (host, cause) of the incidents on record after a time."""
        found = read_incidents(self.run / "hosts.json")
        return [(one.host, one.cause) for one in found if one.time > since]

    def supervisor(self) -> int:
        """Return its process ID on this machine."""
        (found,) = [
            process.pid
            for process in self.cluster.processes(self.host, containing="hvdtrain.cli launch")
            if process.command.startswith("python")
        ]
        return found
