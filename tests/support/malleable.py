"""A run of `hvdtrain deploy malleable` on a test cluster with Slurm."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain import cli
from hvdtrain.deploy.job import DONOR_SCRIPT, RUN_SCRIPT
from tests.support import runs
from tests.support.agent_job import WAIT_SECONDS, DisturbedRun
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.job import Job
from tests.support.slurm import Slurm

# A line about a lost process; not one about its datagrams, which a busy machine delays.
LOST = r"process \d+ on \S+ (?!responds)"


class MalleableRun(DisturbedRun):
    """A run that node1 holds, in the partition that nothing preempts; donors may be preempted.

    Args:
        pace: seconds per micro-batch, of which a step has four.
    """

    def __init__(
        self, cluster: Cluster, slurm: Slurm, train: Sequence[str], pace: float, name: str = "a"
    ) -> None:
        self.cluster, self.slurm = cluster, slurm
        self.root = cluster.shared / f"malleable-{name}"
        self.run = self.root / "runs" / name
        self.slow = self.root / "slow"
        self.root.mkdir()
        self.slow.touch()
        self.env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "VENV": sys.prefix}
        self.env |= {"HVDTRAIN_TEST_SLOW": f"{pace}:{self.slow}", "PYTHONPATH": str(REPOSITORY)}
        options = ["--ranks", "1", "--queue", "high", "--donor-queue", "low", "--name", name]
        keys = [*train, "--run.root", str(self.run.parent), "--run.id", name]
        out = f"--out={self.root}"
        assert cli.main(["deploy", "malleable", *options, out, "--", *keys]) == 0
        self.donor_script = self.root / DONOR_SCRIPT
        output = f"--output={self.root}/log"
        script = str(self.root / RUN_SCRIPT)
        self.job = slurm.sbatch(["--nodelist=node1", "--exclusive", output, script], self.env)

    def output(self) -> str:
        logs: list[Path] = sorted(self.root.glob("*log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)

    def donor(self, *options: str) -> int:
        """Submit a donor by hand; return its job."""
        output = f"--output={self.root}/donors.log"
        return self.slurm.sbatch([output, *options, str(self.donor_script)], self.env)

    def rigid(self, seconds: float, nodes: int = 1) -> int:
        """Submit a job of another user, which may preempt donors."""
        options = [f"--nodes={nodes}", "--exclusive", "--partition=high", "--output=/dev/null"]
        return self.slurm.sbatch([*options, "--job-name=rigid", f"--wrap=sleep {seconds}"])

    def fill(self, *options: str) -> Job:
        """Start `hvdtrain fill` on the host of the run."""
        argv = [sys.executable, "-m", "hvdtrain.cli", "fill", str(self.run), "--every", "1"]
        argv += ["--donor", str(self.donor_script), *options]
        return self.cluster.start("node1", argv, self.slurm.env | self.env, cwd=self.root)

    def log(self) -> str:
        """Return the output of the run's job."""
        log = self.root / "log"
        return log.read_text() if log.exists() else ""

    def check_one_left(self, before: str) -> None:
        """Check that one host has left by agreement since the log was `before`, and none died."""
        log = self.log()[len(before) :]
        assert len(re.findall(r"\w+ leaves: ", log)) == 1, self.output()
        assert not re.search(LOST, log), self.output()

    def finish(self) -> None:
        """Make the remaining steps take no time; the job must exit with 0."""
        self.slow.unlink()
        self.slurm.wait(self.job, "COMPLETED", WAIT_SECONDS)


TRAIN = [
    *("--task", "tests.support.tasks:SlowWhile", *runs.TINY),
    *("--checkpoint.every", "1000"),
]
