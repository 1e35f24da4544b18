"""Models that span ranks of two hosts have the losses of one rank in every layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import runs as local
from tests.support.cluster import REPOSITORY, Cluster

# Each pair of axes across the hosts: two grids contain all pairs but pipeline with shard, which is
# the second test. Single axes: make dev-bench ARGS=layouts.
LAYOUTS = (
    "pipeline 2 x context 2 x tensor 2",
    "shard 2 x context 2 x tensor 2",
)
STEPS = 2
SMALL = "--model.layers=2 --model.width=16 --model.context=16 --eval.every=2"


# Eight ranks at once on the two cores of a small machine.
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_model_that_spans_two_hosts_has_the_losses_of_one_rank(cluster: Cluster) -> None:
    command = "-m tests.soak.bench layouts --np 8 --hosts node1:4,node2:4 --format json"
    named = [word for layout in LAYOUTS for word in ("--layout", layout)]
    argv = [sys.executable, *command.split(), "--steps", str(STEPS), *named, "--", *SMALL.split()]
    done = cluster.run("node1", argv, timeout=360)
    rows = json.loads(done.stdout)["rows"]
    assert [row["layout"] for row in rows if not row["met"]] == [], done
    assert sorted(row["layout"] for row in rows) == sorted(LAYOUTS)
    assert done.returncode == 0, done


@pytest.mark.timeout(500)
def test_one_rank_continues_a_run_that_spanned_two_hosts(cluster: Cluster, runs: Path) -> None:
    sizes = (
        f"--data.train {REPOSITORY}/LICENSE --model.layers 2 --model.width 16 --model.heads 2"
        " --model.context 16 --batch.global_size 8 --batch.micro_size 2 --eval.every 0"
        f" --schedule.name constant --telemetry.port 0 --run.root {runs}"
    )
    degrees = "--parallel.pipeline 2 --parallel.shard.degree 2"
    ranks = f"mpirun -np 4 --host node1:2,node2:2 {cluster.python} -m hvdtrain.train"
    argv = (
        f"{ranks} {sizes} {degrees} --run.id case --train.duration 3 --checkpoint.every 3".split()
    )
    done = cluster.run("node1", argv, timeout=240)
    assert done.returncode == 0, done
    for run_id in ("case", "alone"):
        own = [
            *sizes.split(),
            "--run.id",
            run_id,
            "--train.duration",
            "6",
            "--checkpoint.every",
            "0",
        ]
        done = local.run(runs / "output", own, timeout=200)
        assert done.returncode == 0, done
    found, wanted = (local.losses(runs / run_id) for run_id in ("case", "alone"))
    assert found == pytest.approx(wanted, rel=1e-5)
