"""Exchanges other than the default through faults, resizes and another launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.audit.same import compare
from hvdtrain.bench.processes import launch
from tests.support.cluster import Cluster
from tests.support.faults import PACED, ElasticJob, MpiJob
from tests.support.runs import run, weights

STEPS = 400
EXACT = f"--exchange.name exact --runtime.threads 1 --train.steps {STEPS}"
UNPACED = {"HVDTRAIN_TEST_PACE": "0"}


def test_a_kill_a_resize_or_a_resume_on_other_hosts_changes_a_bit(
    job: Callable[..., ElasticJob], cluster: Cluster, runs: Path
) -> None:
    alone = runs / "alone"
    flags = f"{PACED} {EXACT} --run.root {alone} --run.id case".split()
    done = run(alone, flags, env=UNPACED)
    assert done.returncode == 0, done

    running = job(arguments=EXACT)
    running.wait_for_step(10)
    running.kill(1)
    running.wait_for_world(3, 20)
    running.wait_for_world(4, 30)
    running.set_hosts("node1:2")
    running.wait_for_world(2, 30)
    running.set_hosts("node1:2 node2:2")
    running.wait_for_world(4, 40)
    running.wait_for_more(5, 20)
    running.end()

    resumed = MpiJob(cluster, runs, EXACT, UNPACED, np=2)
    resumed.ended(0)
    found = compare(alone / "case", resumed.run)
    assert found.same and found.steps == STEPS and found.hashes >= STEPS // 100, found.to_text()
    assert weights(resumed.run, STEPS) == weights(alone / "case", STEPS)


# topk sends 4 of 9 elements here: the curve is another one.
@pytest.mark.parametrize(
    ("flags", "same_curve"),
    [
        ("--exchange.wire float16", True),
        ("--exchange.wire bfloat16", True),
        ("--exchange.compression topk --exchange.ratio 0.4", False),
    ],
)
def test_a_newcomer_does_not_fit_in_or_the_curve_leaves_that_of_float32(
    job: Callable[..., ElasticJob],
    reference: list[dict[str, Any]],
    flags: str,
    same_curve: bool,
) -> None:
    running = job(np=2, hosts="node1:1 node2:1", arguments=flags)
    running.wait_for_step(10)
    running.kill(1)
    running.wait_for_world(1, 20)
    running.wait_for_world(2, 30)
    running.wait_for_more(5, 20)
    done = running.end()
    lost = [start["residuals_lost"] for start in running.events("start")]
    assert lost == ([0, 0, 0] if same_curve else [0, 1, 0]), done
    lines = running.lines()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), done
    for line, expected in zip(lines, reference if same_curve else [], strict=False):
        assert abs(line["loss"] - expected["loss"]) <= 0.01 * expected["loss"] + 1e-6


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_a_sum_within_hosts_first_is_another_one(cluster: Cluster, launcher: str) -> None:
    command = [sys.executable, "-m", "tests.support.summed", "on"]
    done = cluster.run("node1", launch(launcher, 4, command, "node1:2,node2:2"), timeout=90)
    assert done.returncode == 0 and "right on 4 ranks" in done.stdout, done
