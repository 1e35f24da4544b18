"""`hvdtrain bench` between hosts. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

SIDES = ["Horovod, Gloo", "Horovod, MPI", "MPI_Allreduce", "torch gloo"]


def test_an_all_reduce_between_hosts_is_not_measured_by_all_sides(
    cluster: Cluster, runs: Path
) -> None:
    plot = runs / "plot.svg"
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
        assert row["busbw_gb_per_s"] == row["algbw_gb_per_s"] > 0  # of 2 ranks they are one
        sent = row["algbw_gb_per_s"] * row["seconds"] * 1e9
        assert sent == pytest.approx(row["bytes"])
        references = {"MPI_Allreduce", "torch gloo"} if row["side"].startswith("Horovod") else set()
        assert set(row["of"]) == references
    assert plot.read_text().startswith("<svg")
