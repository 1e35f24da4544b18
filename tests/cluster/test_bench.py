"""`hvdtrain bench` between hosts, without limits on the measured values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.runs import TINY

SIDES = ["Horovod, Gloo", "Horovod, MPI", "MPI_Allreduce", "torch gloo"]


@pytest.mark.soak
def test_bench_allreduce_measures_every_side_between_hosts(cluster: Cluster, runs: Path) -> None:
    plot = runs / "plot.html"
    command = "hvdtrain bench allreduce --hosts node1:1,node2:1 --sizes 1M,4K --rounds 1"
    argv = [*command.split(), "--format", "json", "--plot", str(plot)]
    done = cluster.run("node1", argv, timeout=120)
    assert done.returncode == 0, done
    report = json.loads(done.stdout)
    assert (report["ranks"], report["hosts"]) == (2, "node1:1,node2:1")
    assert report["left_out"] == {"Horovod, NCCL": "Horovod was built without NCCL"}
    found = [(row["bytes"], row["side"]) for row in report["rows"]]
    assert found == [(size, side) for size in (4096, 1 << 20) for side in SIDES]
    for row in report["rows"]:
        assert row["busbw_gb_per_s"] == row["algbw_gb_per_s"] > 0  # with 2 ranks they are the same
        sent = row["algbw_gb_per_s"] * row["seconds"] * 1e9
        assert sent == pytest.approx(row["bytes"])
        references = {"MPI_Allreduce", "torch gloo"} if row["side"].startswith("Horovod") else set()
        assert set(row["of"]) == references
    assert "Bus bandwidth" in plot.read_text()


@pytest.mark.soak
def test_bench_exchange_compares_a_strategy_with_no_exchange(cluster: Cluster, runs: Path) -> None:
    plot, root = runs / "plot.html", runs / "root"
    command = "hvdtrain bench exchange --hosts node1:1,node2:1 --launcher mpi --steps 20"
    argv = [*command.split(), "--strategies", "float16", "--format", "json", "--plot", str(plot)]
    done = cluster.run(
        "node1", [*argv, "--", *TINY, "--eval.batches=1", f"--run.root={root}"], timeout=120
    )
    assert done.returncode == 0, done
    report = json.loads(done.stdout)
    where = (report["ranks"], report["hosts"], report["launcher"], report["rounds"])
    assert where == (2, "node1:1,node2:1", "mpi", 1)
    alone, float16 = report["rows"]
    assert (alone["side"], float16["side"]) == ("no exchange", "float16")
    assert float16["step_seconds"] > 0 and alone["step_seconds"] > 0
    ratio = float16["step_seconds"] / alone["step_seconds"]
    assert float16["of"] == {"no exchange": pytest.approx(ratio)}
    assert 1e4 < float16["sent_bytes"] < 1e6 and alone["sent_bytes"] is None
    # All steps were done when the only strategy ended.
    assert 0 < float16["loss"] == float16["loss_at_equal_seconds"] < 6
    assert 0 < float16["validation_loss"] < 6
    assert "Training loss" in plot.read_text()
    assert list(root.iterdir()) == []  # no files remain
