"""The literal commands of the README on two hosts."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from hvdtrain.audit.same import compare
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.job import poll
from tests.support.runs import run
from tests.support.tasks import INJECTED

STEPS = 3
# Sixteen ranks on the two cores of a small machine: most of it is importing torch.
LAUNCH_SECONDS = 300
SMALL = (
    "--model.layers 2 --model.width 64 --model.heads 2 --model.context 64"
    f" --train.duration {STEPS} --eval.every 0 --checkpoint.every 0"
)
EXACT = "--exchange.name exact --runtime.threads 1"
SIXTEEN = {
    "horovodrun-gloo": "horovodrun --gloo -np 16 -H node1:8,node2:8",
    "mpirun": "mpirun -np 16 --hostfile hostfiles/two-nodes",
}
# With the default 8 micro-batches half of the ranks would have none; here each has two.
BATCHES = {"idle-ranks": "", "two-each": "--batch.micro_size 1"}
THREE = {
    "gloo": "horovodrun --gloo -np 3 -H node1:1,node2:2",
    "mpi": "horovodrun --mpi -np 3 -H node1:1,node2:2",
    "mpirun": "mpirun -x HVDTRAIN_TEST_FAIL -np 3 --host node1:1,node2:2",
}


# Sixteen ranks leave no cores for another test.
@pytest.mark.alone
@pytest.mark.timeout(LAUNCH_SECONDS + 60)
@pytest.mark.parametrize(
    ("launcher", "batch"),
    [
        pytest.param("horovodrun-gloo", "idle-ranks", marks=pytest.mark.soak),
        pytest.param("mpirun", "two-each", marks=pytest.mark.soak),
    ],
)
def test_sixteen_ranks_on_two_hosts_match_one_process_bitwise(
    cluster: Cluster, runs: Path, launcher: str, batch: str
) -> None:
    flags = f"{SMALL} {EXACT} {BATCHES[batch]} --run.root {runs}"
    command = f"{SIXTEEN[launcher]} {cluster.python} -m hvdtrain.train {flags} --run.id case"
    done = cluster.run("node1", command.split(), timeout=LAUNCH_SECONDS)
    assert done.returncode == 0, done
    lines = [json.loads(line) for line in (runs / "case/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {line["world_size"] for line in lines} == {16}
    assert all(math.isfinite(line["loss"]) for line in lines)
    hosts = json.loads((runs / "case/manifest.json").read_text())["hosts"]
    assert hosts == {"node1": list(range(8)), "node2": list(range(8, 16))}
    alone = run(runs / "alone", [*flags.split(), "--run.id", "alone", "--telemetry.port", "0"])
    assert alone.returncode == 0, alone
    found = compare(runs / "alone", runs / "case")
    assert found.same and (found.steps, found.hashes) == (STEPS, 1), found.to_text()


@pytest.mark.parametrize(
    ("launcher", "rank"), [("gloo", 2), pytest.param("mpi", 0, marks=pytest.mark.soak)]
)
def test_error_in_one_rank_ends_all_ranks_on_both_hosts(
    cluster: Cluster, runs: Path, launcher: str, rank: int
) -> None:
    command = (
        f"{THREE[launcher]} {cluster.python} -m hvdtrain.train --task tests.support.tasks:Failing"
        f" --batch.global_size 3 --batch.micro_size 1 --run.root {runs} --run.id case"
    )
    job = cluster.start("node1", command.split(), {"HVDTRAIN_TEST_FAIL": f"{rank}:{STEPS}"})
    failed_at = job.wait_for(INJECTED, timeout=120)
    poll(lambda: not cluster.ranks(), 30, "the end of all ranks")
    seconds = time.monotonic() - failed_at
    done = job.wait(20)
    assert seconds < 10, f"the last rank ended {seconds:.1f} s after the error: {done}"
    assert done.returncode == 1, done


# The ranks' communication does not depend on who starts mpirun.
@pytest.mark.parametrize("launcher", [pytest.param("gloo", marks=pytest.mark.soak), "mpirun"])
def test_host_without_the_data_is_reported_once_as_invalid_input(
    cluster: Cluster, runs: Path, launcher: str
) -> None:
    corpus = cluster.file("node1", "/tmp/corpus")
    corpus.mkdir(exist_ok=True)
    (corpus / "README.txt").write_bytes((REPOSITORY / "LICENSE").read_bytes())
    train = f"{cluster.python} -m hvdtrain.train --run.root {runs} --run.id case"
    argv = f"{THREE[launcher]} {train}".split()
    argv += ["--data.train", '["/tmp/corpus/*.txt"]', *SMALL.split()]
    done = cluster.run("node1", argv, {"HVDTRAIN_TEST_FAIL": ""}, timeout=120)
    assert done.returncode == 2, done
    assert (done.stdout + done.stderr).count("/tmp/corpus/*.txt") == 1, done
