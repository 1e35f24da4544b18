"""Long runs between two hosts: metrics are printed, and only coarse limits are asserted.

HVDTRAIN_SOAK_SECONDS: approximate duration of the disturbed run (default 300).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.faults import PACED, ElasticJob, assert_same_curve
from tests.support.runs import metrics, run

SECONDS = int(os.environ.get("HVDTRAIN_SOAK_SECONDS", "300"))
# A step takes 0.1 s on 4 ranks, and 0.2 s on 3 while the fourth is replaced.
STEPS = round(SECONDS / 0.16)
KILL_EVERY = 20.0
LEAST_GOODPUT, AIM = 0.5, 0.8
ARGUMENTS = f"--train.duration {STEPS}"
SIXTEEN = 16
SMALL = "--model.layers=2 --model.width=64 --model.heads=2 --model.context=64 --batch.micro_size=1"


@pytest.fixture
def reference(tmp_path: Path) -> list[dict[str, Any]]:
    """Losses of the same run without faults: one process, no launcher."""
    arguments = f"{PACED} --run.root {tmp_path} --run.id case {ARGUMENTS}".split()
    done = run(tmp_path / "output", arguments, env={"HVDTRAIN_TEST_PACE": "0"}, timeout=300)
    assert done.returncode == 0, done
    return metrics(tmp_path / "case")


@pytest.mark.timeout(3 * SECONDS + 600)
def test_kills_every_20_seconds_keep_the_losses_and_most_of_the_goodput(
    cluster: Cluster,
    runs: Path,
    reference: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = ElasticJob(cluster, runs, arguments=ARGUMENTS)
    try:
        running.wait_for_step(5)
        kills = _kill_until_the_end(running, random.Random(SECONDS))
        done = running.job.wait(30)
    finally:
        running.job.kill()
    assert done.returncode == 0, done
    argv = [sys.executable, "-m", "hvdtrain.cli", "audit", str(running.run)]
    text = cluster.run("node1", argv)
    found = json.loads(cluster.run("node1", [*argv, "--format", "json"]).stdout)
    lines = running.lines()
    with capsys.disabled():
        print(f"\n{kills} kills, {STEPS} steps\n{text.stdout}")
        print(f"goodput {found['goodput']:.3f} (aim: {AIM}), last loss {lines[-1]['loss']:.9g}")
        _print_costs(found, lines)
    assert found["clean"], text
    assert len(lines) == STEPS
    assert_same_curve(lines, reference)
    assert lines[-1]["loss"] == pytest.approx(reference[-1]["loss"], rel=1e-4)
    assert kills >= SECONDS / KILL_EVERY / 2, "the run was hardly disturbed"
    assert found["goodput"] > LEAST_GOODPUT, text


@pytest.mark.timeout(SECONDS + 600)
def test_sixteen_ranks_on_two_processors_are_not_declared_dead(
    cluster: Cluster, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = ElasticJob(
        cluster, runs, "node1:8 node2:8", np=16, arguments="--train.duration 1000000",
        options="--verbose",
    )  # fmt: skip
    try:
        running.wait_for_step(1, 200)
        before = running.last()["step"]
        time.sleep(SECONDS)
        step = running.last()["step"]
        done = running.end()
    finally:
        running.job.kill()
    delays = [line for line in done.stderr.splitlines() if "heartbeats: the longest delay" in line]
    with capsys.disabled():
        print(f"\n{step - before} steps of 16 ranks in {SECONDS} s; {' '.join(delays)}")
    assert {line["world_size"] for line in running.lines()} == {SIXTEEN}
    assert len(running.events("start")) == 1, "a process was replaced"
    assert "fell silent" not in done.stderr, done
    assert delays, done


def _print_costs(found: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Print costs that the audit does not count as lost: fewer ranks are slower, and starts
    disturb."""
    steps = {
        size: [line["step_seconds"] for line in lines if line["world_size"] == size]
        for size in sorted({line["world_size"] for line in lines})
    }
    for size, seconds in steps.items():
        print(f"{len(seconds)} steps on {size} ranks, median {median(seconds):.3f} s")
    undisturbed = len(lines) * median(steps[4])
    print(f"at the pace of 4 ranks: {undisturbed:.1f} s of {found['wall_seconds']:.1f} s")
    for cause in ("failure", "hosts"):
        seconds = [g["seconds"] for g in found["generations"] if g["cause"] == cause]
        if seconds:
            print(f"cause {cause}: {len(seconds)} new meetings, median {median(seconds):.2f} s")


def _kill_until_the_end(running: ElasticJob, choice: random.Random) -> int:
    """Kill a random process of the job every 20 s; return the number of kills."""
    limit = time.monotonic() + 3 * SECONDS + 60
    following, kills = time.monotonic() + KILL_EVERY / 2, 0
    while running.job.running():
        assert time.monotonic() < limit, f"it does not end: {running.job.output()}"
        ranks = running.cluster.ranks()
        if time.monotonic() >= following and ranks and running.last()["step"] < STEPS:
            running.cluster.kill([choice.choice(ranks)])
            following += KILL_EVERY
            kills += 1
        time.sleep(0.1)
    return kills


@pytest.mark.timeout(900)
def test_sixteen_ranks_recover_from_a_kill_faster_than_upstream(
    cluster: Cluster, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "hvdtrain.cli", "bench", "recovery"]
    command += f"--np {SIXTEEN} --hosts node1:8,node2:8 --rounds 1 --steps 3".split()
    command += ["--format", "json", "--", f"--run.root={runs}", *SMALL.split()]
    done = cluster.run("node1", command, timeout=600)
    assert done.returncode == 0, done
    seconds = {metric["name"]: metric["median"] for metric in json.loads(done.stdout)["figures"]}
    with capsys.disabled():
        print(f"\n{SIXTEEN} ranks on 2 hosts: {seconds}")
    # horovod#3556 reports 15.8 s, on hosts with a processor for each rank.
    assert seconds["of which re-initialization"] < 15.8, done
