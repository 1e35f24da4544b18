"""How many donors `hvdtrain fill` submits, and how it ends; tests/cluster has a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.agent import driver_file
from hvdtrain.agent.driver_file import DriverFile
from hvdtrain.deploy.fill import Fill, Use, gains, parse_jobs, parse_nodes
from hvdtrain.run_files.ownership import TokenPace
from hvdtrain.supervise import run_progress
from tests.support.job import poll

IDLE = """\
idle|low*|node1
idle|high|node1
idle|low*|node2
plnd|low*|node3
idle~|low*|node4
alloc|low*|node5
"""
SECONDS = 60


@pytest.fixture
def fill(tmp_path: Path) -> Fill:
    script = tmp_path / "donor.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --partition=low\n#SBATCH --ntasks-per-node=2\n")
    return Fill(tmp_path / "runs/a", script, most=3, every=1, wait=5)


def _job(state: str, reason: str = "None", nodes: str = "1", name: str = "x") -> str:
    """A line of squeue for a job of another user."""
    return f"7|{os.geteuid() + 1}|{state}|{reason}|{nodes}|low,b|{name}\n"


def _count(fill: Fill, jobs: str, use: Use = Use(), now: float = 0.0) -> int:  # noqa: B008
    return fill.count(parse_nodes(IDLE), parse_jobs(jobs), use, now)[0]


def _own(fill: Fill, state: str, reason: str = "None") -> str:
    return f"8|{os.geteuid()}|{state}|{reason}|1|low|{fill._name}\n"


def test_donors_are_submitted_for_idle_nodes_up_to_the_limits(fill: Fill) -> None:
    assert _count(fill, "") == 2, "nodes that are off, in use or planned for a job are not idle"
    assert _count(fill, _own(fill, "PENDING")) == 1
    assert _count(fill, _own(fill, "PENDING", "BeginTime")) == 2
    assert _count(fill, 2 * _own(fill, "RUNNING")) == 1, "--most"
    assert _count(fill, "", Use(donors=1)) == 1
    assert _count(fill, _own(fill, "RUNNING"), Use(donors=1)) == 0
    assert _count(fill, "", Use(gains=False)) == 0


@pytest.mark.parametrize(
    ("job", "count"),
    [
        (_job("PENDING", "Resources", "2"), 0),
        (_job("PENDING", "Priority"), 0),
        (_job("PENDING", "Resources", "3"), 2),  # more nodes than are idle
        (_job("PENDING", "Resources", "1K"), 2),
        (_job("PENDING", "Dependency"), 2),
        (_job("RUNNING"), 2),
        (_job("PENDING", name="a|b"), 0),
        ("garbage\n", 2),
    ],
)
def test_donors_wait_for_a_job_that_may_start(fill: Fill, job: str, count: int) -> None:
    assert _count(fill, job) == count
    assert _count(fill, job, now=SECONDS + 1.0) == 2, "Slurm has passed it over"


def test_name_of_donors_is_one_name_for_scancel(fill: Fill) -> None:
    other = Fill(Path("/runs/a,b c"), fill.script, most=1, every=1, wait=1)
    assert other._name.startswith("donor-a_b_c-") and other._name != fill._name


def _lines(ranks: int, speed: float, count: int = 9) -> list[dict[str, float]]:
    return [{"world_size": ranks, "samples_per_second": speed}] * count


def test_gain_of_the_last_ranks_is_measured() -> None:
    assert gains([])
    assert gains([*_lines(1, 10), *_lines(2, 19)])
    assert not gains([*_lines(1, 10), *_lines(2, 10.1)])
    assert gains([*_lines(1, 10), *_lines(2, 10, count=2)]), "too few steps"
    assert gains([*_lines(4, 40), *_lines(2, 20)])


@pytest.fixture
def driven(fill: Fill) -> Iterator[Path]:
    """A run directory whose driver is alive."""
    with run_progress.hold(fill.run, TokenPace(beat=0.2, lease=True)):
        driver_file.write(fill.run, DriverFile(["127.0.0.1"], 1, "00"))
        yield fill.run


def _start(run: Path, script: Path, **stubs: str) -> subprocess.Popen[str]:
    """Start fill with shell commands as Slurm's commands."""
    bin_directory = run.parent / "bin"
    bin_directory.mkdir(exist_ok=True)
    for name in ("sinfo", "squeue", "sbatch", "scancel"):
        (bin_directory / name).write_text(f"#!/bin/sh\n{stubs.get(name, '')}\n")
        (bin_directory / name).chmod(0o755)
    argv = [sys.executable, "-m", "hvdtrain.cli", "fill", str(run), "--most", "2", "--every", "1"]
    return subprocess.Popen(
        [*argv, "--donor", str(script), "--wait", "3"],
        env=os.environ | {"PATH": f"{bin_directory}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_fill_ends_with_the_exit_code_of_the_run(fill: Fill, driven: Path) -> None:
    calls = driven / "calls"
    process = _start(driven, fill.script, sinfo="echo 'idle|low|n1'", sbatch=f"echo $* > {calls}")
    poll(calls.exists, SECONDS, "a donor")
    assert calls.read_text().split()[-1] == str(fill.script)
    driver_file.write(driven, DriverFile(["127.0.0.1"], 1, "", exit_code=3))
    stderr = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 3, stderr
    assert stderr.splitlines()[-1] == "hvdtrain fill: the run has ended with exit code 3"


def test_refused_donors_end_fill_with_one_message(fill: Fill, driven: Path) -> None:
    refused = "echo 'sbatch: error: invalid partition specified: low' >&2; exit 1"
    process = _start(driven, fill.script, sinfo="echo 'idle|low|n1'", sbatch=refused)
    stderr = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 2
    assert stderr.count("invalid partition specified: low") == 2, "when it happens, and at the end"
    assert "Traceback" not in stderr


def test_slurm_that_does_not_answer_is_asked_again(fill: Fill, driven: Path) -> None:
    process = _start(driven, fill.script, squeue="echo 'squeue: error: timed out' >&2; exit 1")
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or []), daemon=True)
    reader.start()
    poll(lambda: any("timed out; trying again" in line for line in lines), SECONDS, "the error")
    driver_file.write(driven, DriverFile(["127.0.0.1"], 1, "", exit_code=0))
    assert process.wait(SECONDS) == 0
    reader.join(SECONDS)
    assert sum("timed out" in line for line in lines) == 1


def test_fill_without_a_driver_ends_after_wait(fill: Fill) -> None:
    process = _start(fill.run, fill.script) if fill.run.parent.mkdir() is None else None
    assert process is not None
    stderr = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 1
    assert "no driver of" in stderr and "--wait" in stderr
