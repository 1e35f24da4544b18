"""Real runs in which a rank computes a wrong gradient, and runs in which none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.run_files.events_file import read_lines
from tests.support.job import Finished
from tests.support.runs import losses, metrics, run, weights

STEPS = 12
FLAGS = [
    *("--task", "tests.support.miscomputing:Miscomputing", "--telemetry.port", "0"),
    *("--batch.global_size", "12", "--batch.micro_size", "4", "--eval.every", "0"),
    *("--train.duration", str(STEPS), "--checkpoint.every", str(STEPS), "--run.id", "run"),
    *("--exchange.name", "exact", "--runtime.threads", "1"),
]
REPLAY = ("--integrity.replay_every", "4")
THREE_HOSTS, TWO_HOSTS, ONE_HOST = "a,b,c", "a,b,b", "a,a,a"


def _run(
    root: Path, *flags: str, hosts: str = THREE_HOSTS, wrong: str = "-1:0:all", ranks: int = 3
) -> Finished:
    env = {"HVDTRAIN_TEST_HOSTS": hosts, "HVDTRAIN_TEST_WRONG": wrong}
    return run(root / "output", [*FLAGS, "--run.root", str(root), *flags], f"gloo:{ranks}", env)


def _replays(root: Path) -> list[tuple[int, str, list[int]]]:
    events = read_lines(root / "run/events.jsonl")
    found = [event for event in events if event["event"] == "replay"]
    return [(event["step"], event["verdict"], event["ranks"]) for event in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run without replays."""
    root = tmp_path_factory.mktemp("undisturbed")
    done = _run(root, "--integrity.replay_every", "0")
    assert done.returncode == 0, done
    return root / "run"


def test_replays_change_no_bit(undisturbed: Path, tmp_path: Path) -> None:
    done = _run(tmp_path, *REPLAY)
    assert done.returncode == 0 and not _replays(tmp_path), done
    assert losses(tmp_path / "run") == losses(undisturbed)
    assert weights(tmp_path / "run", STEPS) == weights(undisturbed, STEPS)


def test_wrong_host_of_three_is_named_and_nothing_is_saved(tmp_path: Path) -> None:
    done = _run(tmp_path, *REPLAY, wrong="1:8:1", hosts=THREE_HOSTS)
    assert done.returncode == 1, done
    assert done.stderr.count("step 8: rank 1 on b computed a wrong gradient") == 1, done
    assert "start again without b" in done.stderr and "Traceback" not in done.stderr, done
    assert _replays(tmp_path) == [(8, "wrong", [1])]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [*range(1, 8)]
    assert not [*(tmp_path / "run/checkpoints").glob("step_*")]


@pytest.mark.parametrize("hosts", [TWO_HOSTS, pytest.param(ONE_HOST, marks=pytest.mark.soak)])
def test_step_with_a_transient_error_is_repeated(
    undisturbed: Path, tmp_path: Path, hosts: str
) -> None:
    done = _run(tmp_path, *REPLAY, wrong="1:8:1", hosts=hosts)
    assert done.returncode == 0, done
    assert _replays(tmp_path) == [(8, "transient", [1])]
    assert "rank 1 on " in done.stderr and "but not when the ranks repeat it" in done.stderr, done
    assert losses(tmp_path / "run") == losses(undisturbed)
    assert weights(tmp_path / "run", STEPS) == weights(undisturbed, STEPS)


@pytest.mark.parametrize("hosts", ["a,b", pytest.param("a,a", marks=pytest.mark.soak)])
def test_two_ranks_that_remain_different_stop_the_run(tmp_path: Path, hosts: str) -> None:
    done = _run(tmp_path, *REPLAY, wrong="1:8:all", hosts=hosts, ranks=2)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    assert done.stderr.count("and no majority decides which one is wrong") == 1, done
    assert _replays(tmp_path) == [(8, "undecided", [0, 1])]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [*range(1, 8)]
    assert not [*(tmp_path / "run/checkpoints").glob("step_*")]


def test_undecided_difference_ends_only_runs_that_asked_for_replays(
    tmp_path: Path,
) -> None:
    done = _run(tmp_path, "--train.duration", "202", wrong="1:200:all", hosts="a,b", ranks=2)
    assert done.returncode == 0, done
    assert done.stderr.count("because integrity.replay_every is not set") == 1, done
    assert _replays(tmp_path) == [(200, "off", [])]


def test_rank_whose_loss_is_not_finite_is_not_accused(tmp_path: Path) -> None:
    flags = "--task tests.support.tasks:NotFinite --batch.global_size 8 --batch.micro_size 2"
    flags += f" --checkpoint.every 1 --telemetry.port 0 --run.id run --run.root {tmp_path}"
    argv = [*flags.split(), *REPLAY]
    done = run(tmp_path / "output", argv, "gloo:2", {"HVDTRAIN_TEST_NAN": "4"})
    assert done.returncode == 0, done
    assert [line["step"] for line in metrics(tmp_path / "run") if line.get("skipped")] == [4]
    assert not _replays(tmp_path)
