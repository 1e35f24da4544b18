"""torchrun on two hosts: one run of all ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.cluster import Cluster
from tests.support.runs import TINY, TORCHRUN, losses, metrics, train


def test_ranks_of_two_agents_train_as_one_run(cluster: Cluster, runs: Path, tmp_path: Path) -> None:
    where = ["--run.root", str(runs), "--run.id", "a", "--train.duration", "6"]
    agent = [*TORCHRUN, "--nnodes", "2", "--master-addr", "node1", "--master-port", "29500"]
    # Different numbers of ranks, so that one local rank exists on one host only.
    jobs = [
        cluster.start(
            name,
            [
                *(*agent, "--node-rank", str(number), "--nproc-per-node", str(ranks)),
                *("--no-python", cluster.python, "-m", "hvdtrain.train", *TINY, *where),
            ],
        )
        for number, (name, ranks) in enumerate({"node1": 2, "node2": 1}.items())
    ]
    for job in jobs:
        done = job.wait(90)
        assert done.returncode == 0, done
    assert {line["world_size"] for line in metrics(runs / "a")} == {3}
    alone = train(tmp_path, "alone", ["--train.duration", "6"])
    gaps = zip(losses(runs / "a"), losses(alone), strict=True)
    assert max(abs(a - b) / b for a, b in gaps) <= 1e-5
