"""A host that holds the only shards is killed: the run continues from copies in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.checkpoint.layout import finished
from tests.support.faults import ElasticJob, assert_clean
from tests.support.runs import CORPUS, metrics, run

MODEL = (
    "--task tests.support.interrupted_transfers:DamagedCopies"
    " --model.layers 2 --model.width 32 --model.heads 2 --model.context 32"
    f" --data.train {CORPUS} --batch.global_size 8 --batch.micro_size 2 --optim.name adamw"
    " --telemetry.port 0 --schedule.name constant --train.log_every 1 --eval.every 0"
    " --train.replica_check_every 1 --runtime.threads 1 --train.duration 16"
)
COPIES = "--checkpoint.memory.every 5"
TWO_RANKS = "--parallel.tensor 2"
FOUR_RANKS = "--parallel.pipeline 2 --parallel.shard.degree 2"
# All ranks of node2 die when all ranks have agreed on step 13.
HOST_DIES = {TWO_RANKS: "1:after:13", FOUR_RANKS: "2:after:13,3:after:13"}

pytestmark = pytest.mark.timeout(500)


Start = Callable[..., ElasticJob]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Returns metrics.jsonl of a layout without copies and without a fault."""

    @cache
    def lines(layout: str) -> list[dict[str, Any]]:
        root, ranks = tmp_path_factory.mktemp("undisturbed"), _ranks(layout)
        flags = f"{MODEL} {layout} --checkpoint.every 0 --run.root {root} --run.id case"
        done = run(root / "output", flags.split(), f"gloo:{ranks}", timeout=200)
        assert done.returncode == 0, done
        return metrics(root / "case")

    return lines


@pytest.fixture
def start(job: Start) -> Start:
    """Start a job whose ranks on node2 die.

    `save_every` is checkpoint.every, and further arguments are environment variables.
    """

    def start(layout: str, save_every: int = 8, **env: str) -> ElasticJob:
        ranks, env = _ranks(layout), {"HVDTRAIN_TEST_DIE": HOST_DIES[layout], **env}
        return job(
            arguments=f"{MODEL} {layout} {COPIES} --checkpoint.every {save_every}",
            np=ranks,
            min_np=ranks,
            hosts=f"node1:{ranks // 2} node2:{ranks // 2}",
            env=env,
        )

    return start


def _ranks(layout: str) -> int:
    return 2 if layout == TWO_RANKS else 4


def _assert_bitwise_identical(run: Path, undisturbed: list[dict[str, Any]]) -> None:
    """Check that each step was counted once, with the state of the undisturbed run after it."""
    lines = metrics(run)
    for key in ("step", "loss", "state_hash"):
        assert [line[key] for line in lines] == [line[key] for line in undisturbed], key


@pytest.mark.parametrize("layout", [TWO_RANKS, pytest.param(FOUR_RANKS, marks=pytest.mark.soak)])
def test_killed_host_costs_few_declared_steps_repeated_bitwise(
    start: Start,
    undisturbed: Callable[[str], list[dict[str, Any]]],
    record_property: Callable[[str, object], None],
    layout: str,
) -> None:
    # The checkpoint of step 11 is newer than the copies: the run leaves it, and saves it again.
    running = start(layout, save_every=11)
    done = running.job.wait(200)
    assert done.returncode == 0, done
    _, again = running.events("start")
    record_property("seconds", again["seconds"])
    assert (again["source"], again["step"]) == ("memory_copy", 10), (again, done)
    assert again["lost_step"] in (12, 13) and again["lost_steps"] <= 3, again
    assert "the run continues from the copies in memory of step 10" in done.stderr, done
    _assert_bitwise_identical(running.run, undisturbed(layout))
    saved = [path.name for path in finished(running.run / "checkpoints")]
    assert saved == ["step_00000011", "step_00000016"]
    audit = assert_clean(running.run)
    assert "warning" not in audit, audit
    assert "continued from the copies in memory of step 10; steps redone:" in audit, audit


@pytest.mark.soak
@pytest.mark.parametrize(
    ("damaged", "source", "step"), [("10", "memory_copy", 5), ("1,5,10", "checkpoint", 8)]
)
def test_damaged_copies_are_named_and_never_used(
    start: Start,
    undisturbed: Callable[[str], list[dict[str, Any]]],
    damaged: str,
    source: str,
    step: int,
) -> None:
    running = start(TWO_RANKS, HVDTRAIN_TEST_DAMAGE=f"12:{damaged}")
    done = running.job.wait(200)
    assert done.returncode == 0, done
    _, again = running.events("start")
    assert (again["source"], again["step"]) == (source, step), (again, done)
    assert any("of step 10 on rank" in name for name in again["damaged_copies"]), again
    assert "is damaged, and is not used" in done.stderr, done
    _assert_bitwise_identical(running.run, undisturbed(TWO_RANKS))
    assert "was damaged, and not used" in assert_clean(running.run)


@pytest.mark.soak
def test_copies_change_no_bit_of_an_undisturbed_run(
    start: Start, undisturbed: Callable[[str], list[dict[str, Any]]]
) -> None:
    running = start(TWO_RANKS, HVDTRAIN_TEST_DIE="")
    running.ended(0)
    assert len(running.events("start")) == 1
    _assert_bitwise_identical(running.run, undisturbed(TWO_RANKS))
