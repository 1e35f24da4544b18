"""A run under `hvdtrain launch` on two hosts, and what its tests check after a fault."""

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

from tests.support import runs as local
from tests.support.cluster import Cluster
from tests.support.job import Finished, Job, poll

# More than are done before the last test, which does the rest quickly.
STEPS = 900
EVERY = 20
# Of which most is the start of the ranks: on a machine where that takes longer, this does too.
# 8 to 14 s alone; here another test may start its ranks at the same time.
RECOVERY_SECONDS = 30
RECOVERY_STARTS = 2.5
# Starting all ranks twice on a busy machine, and the steps.
TEST_SECONDS = 150
COMMON = [
    *("--train.steps", str(STEPS), "--checkpoint.every", str(EVERY), "--eval.every", "0"),
    # As much for each rank: one that waits for another polls, under MPI.
    *("--batch.global_size", "3", "--batch.micro_size", "1", "--telemetry.port", "0"),
    # So slow that the loss does not become as small as what is lost in a sum.
    *("--optim.lr", "0.001"),
]

# Of the host that is lost there is more than one rank; the other ones cost time alone.
HOSTS = "--hosts node1:1,node2:2"
ALL = 3
SLOW = "--task tests.support.tasks:Slow"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HVDTRAIN_TEST_PACE": "0.1"}
# Three of the supervisor's looks at the run's files, a second apart, and a little.
PACE_SECONDS = 4.0
NO_PACE = {"HVDTRAIN_TEST_PACE": "0"}

Record = Callable[[str, object], None]


class Supervised:
    """A supervised run on node1 and node2; its first supervisor is on node1.

    Attributes:
        run: its directory.
        job: the supervisor that was started last.
        host: where that is.
    """

    def __init__(
        self,
        cluster: Cluster,
        root: Path,
        options: str = HOSTS,
        task: str = SLOW,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster, self.run = cluster, root / "case"
        self._options, self._train = options.split(), [*COMMON, *task.split()]
        self._train += ["--run.root", str(root), "--run.id", "case"]
        self.first_start = 0.0  # seconds from the command to its first step
        self.job = self.start(env=env)

    def start(
        self, host: str = "node1", more: str = "", env: Mapping[str, str] | None = None
    ) -> Job:
        """Starts a supervisor; `more` are options of its own."""
        launch = ["python", "-m", "hvdtrain.cli", "launch", *self._options, *more.split()]
        self.started_at, self.host = time.time(), host
        argv = [*launch, "--", *self._train]
        self.job = self.cluster.start(host, argv, ENVIRONMENT | dict(env or {}))
        return self.job

    def lines(self) -> list[dict[str, Any]]:
        return local.metrics(self.run) if (self.run / "metrics.jsonl").exists() else []

    def last(self) -> dict[str, Any]:
        """The last line; that of step 0 where there is none."""
        path = self.run / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        none = {"step": 0, "time": 0.0, "world_size": 0}
        return json.loads(whole.rpartition("\n")[2]) if whole else none

    def starts(self) -> list[dict[str, Any]]:
        return list(json.loads((self.run / "manifest.json").read_text())["starts"])

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        def reached() -> bool:
            assert self.job.running(), self.job.output()
            return bool(self.last()["step"] >= step)

        poll(reached, timeout, f"step {step}: {self.job.output()}")
        self.first_start = self.first_start or self.lines()[0]["time"] - self.started_at

    def train_on(self, ranks: int) -> None:
        """Waits for that many ranks, and for a step in the middle between two checkpoints.

        The supervisor has seen then how long this start's steps take.
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
        """Seconds from the fault to the first line of the next start, and steps done again."""
        poll(lambda: self.starts()[-1]["time"] > fault_at, 60, f"a start: {self.job.output()}")
        start = self.starts()[-1]

        poll(lambda: self.last()["time"] > start["time"], 60, f"a step: {self.job.output()}")
        first = next(line["time"] for line in self.lines() if line["time"] > start["time"])
        return first - fault_at, self.steps_again(fault_at)

    def steps_again(self, fault_at: float) -> int:
        """How many steps were done again after the fault."""
        last, start = next(
            pair for pair in itertools.pairwise(self.starts()) if pair[1]["time"] > fault_at
        )
        path = self.run / "left_metrics.jsonl"  # not there where all could save
        left = path.read_text().splitlines() if path.exists() else []
        lost = [json.loads(line) for line in left if line.endswith("}")]
        lost = [line for line in lost if last["time"] < line["time"] < start["time"]]
        return sum(line["step"] > start["step"] for line in lost)

    def check_recovery(self, seconds: float, lost: int, record: Record) -> None:
        """In time, compared with the first start, and at most the steps since a checkpoint lost."""
        record("recovery_seconds", round(seconds, 1))
        record("steps_again", lost)
        assert lost <= EVERY, f"{lost} steps were done again: {self.job.output()}"
        limit = max(RECOVERY_SECONDS, RECOVERY_STARTS * self.first_start)
        assert seconds <= limit, f"{seconds:.1f} s, not {limit:.1f}: {self.job.output()}"

    def finish(self, undisturbed: list[float]) -> Finished:
        """Starts it again, without a pause in any step: it does the rest, and ends with 0."""
        done = self.start(env=NO_PACE).wait(TEST_SECONDS)
        assert done.returncode == 0, done
        self.check_curve(undisturbed)
        assert self.last()["step"] == len(undisturbed)
        return done

    def check_curve(self, undisturbed: list[float]) -> None:
        """Each step until now once, and the losses of the undisturbed run."""
        lines = self.lines()
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        assert [line["loss"] for line in lines] == pytest.approx(
            undisturbed[: len(lines)], rel=1e-4
        )

    def interrupt(self) -> Finished:
        """As Ctrl-C does."""
        os.kill(self.supervisor(), signal.SIGINT)
        return self.job.wait(15)

    def world_sizes(self, since: float) -> list[int]:
        """Of the starts after a time."""
        return [start["world_size"] for start in self.starts() if start["time"] > since]

    def supervisor(self) -> int:
        """Its process id on this machine."""
        (found,) = [
            process.pid
            for process in self.cluster.processes(self.host, containing="hvdtrain.cli launch")
            if process.command.startswith("python")
        ]
        return found
