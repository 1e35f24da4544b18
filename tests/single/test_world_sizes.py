"""Real launchers on this machine: losses do not depend on the launcher or the world size.

An error is reported once and ends every rank with the same exit code."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from tests.support.job import Finished, poll
from tests.support.runs import TINY, forked_train, losses, metrics, run, start, train, weights
from tests.support.tasks import INJECTED

STEPS, HALF = 60, 30
# 4 micro-batches per step: two ranks have two each, three have 2, 1, 1. For four with one each, and
# sixteen, of which some have none, see tests/cluster (test_faults.py, test_sixteen_ranks.py).
CURVE = ["--train.duration", str(STEPS), "--checkpoint.every", str(HALF)]
DROPOUT = ["--model.dropout", "0.1"]
LAUNCHERS = ["", "mpirun:2", "gloo:3"]


def _name(launcher: str) -> str:
    return launcher.replace(":", "-") or "alone"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one configuration with dropout, by the name of their launcher."""
    root = tmp_path_factory.mktemp("runs")
    for launcher in LAUNCHERS:
        train(root, _name(launcher), [*CURVE, *DROPOUT], launcher)
    return root


def _assert_agree(directory: Path, other: Path, first: int = 1) -> None:
    """Check that losses are within 1e-4 of each other at each step from `first` on."""
    expected = losses(other)[first - 1 :]
    assert [line["step"] for line in metrics(directory)] == list(range(first, STEPS + 1))
    assert losses(directory) == pytest.approx(expected, rel=1e-4, abs=0)


@pytest.mark.parametrize("launcher", LAUNCHERS[1:])
def test_curve_does_not_depend_on_the_launcher_or_the_world_size(root: Path, launcher: str) -> None:
    directory = root / _name(launcher)
    _assert_agree(directory, root / "alone")
    assert {line["world_size"] for line in metrics(directory)} == {int(launcher[-1])}


def test_model_learns_and_dropout_changes_the_losses(root: Path) -> None:
    without = train(root, "without", CURVE)
    assert losses(without)[-1] < 0.8 * losses(without)[0]
    assert losses(without) != pytest.approx(losses(root / "alone"), rel=1e-4)


def test_runs_on_three_ranks_are_bitwise_reproducible(root: Path) -> None:
    again = train(root, "again", [*CURVE, *DROPOUT], "gloo:3")
    assert losses(again) == losses(root / "gloo-3")
    assert weights(again, STEPS) == weights(root / "gloo-3", STEPS)


@pytest.mark.parametrize("launcher", ["mpirun:2", "gloo:3"])
def test_run_resumed_on_as_many_or_more_ranks_keeps_its_curve(root: Path, launcher: str) -> None:
    checkpoint = root / f"mpirun-2/checkpoints/step_{HALF:08}"
    name = f"resumed-{_name(launcher)}"
    flags = [*CURVE, *DROPOUT, "--run.resume", str(checkpoint)]
    directory = train(root, name, flags, launcher)
    _assert_agree(directory, root / "mpirun-2", first=HALF + 1)
    if launcher == "mpirun:2":
        assert losses(directory) == losses(root / "mpirun-2")[HALF:]
        assert weights(directory, STEPS) == weights(root / "mpirun-2", STEPS)


@pytest.mark.parametrize(("micro_size", "idle"), [(8, 1), (4, 0)])
def test_start_counts_the_ranks_without_a_micro_batch(
    tmp_path: Path, micro_size: int, idle: int
) -> None:
    flags = ["--train.duration", "1", "--batch.micro_size", str(micro_size)]
    done = run(tmp_path / "o", [*TINY, *flags, "--run.root", str(tmp_path)], "gloo:2")
    assert done.returncode == 0, done
    line = "a step has 1 micro-batch for 2 ranks: 1 without work; decrease batch.micro_size"
    assert done.stderr.count(f"hvdtrain: {line}\n") == idle, done
    assert done.stderr.count("without work") == idle, done


# Under each launcher: tests/cluster (test_faults_of_state.py).
def test_signal_to_one_rank_stops_all_with_75_and_loses_no_step(root: Path) -> None:
    where = ["--run.root", str(root), "--run.id", "stopped"]
    flags = [*TINY, *CURVE, *DROPOUT, *where, "--task", "tests.support.tasks:Signalled"]
    # Rank 1 has two micro-batches per step: this one is in step 30, and the next is the last.
    env = {"HVDTRAIN_TEST_SIGNAL": "SIGUSR1:60:1"}
    done = run(root / "output", flags, "mpirun:2", env)
    assert done.returncode == 75, done
    directory = root / where[-1]
    assert len(metrics(directory)) == 31, done
    done = run(root / "output", flags, "mpirun:2")
    assert done.returncode == 0, done
    assert losses(directory) == losses(root / "mpirun-2")
    assert weights(directory, STEPS) == weights(root / "mpirun-2", STEPS)


# Each mistake with one launcher: the ranks' communication does not depend on the launcher.


def _fails(tmp_path: Path, launcher: str, *flags: str) -> Finished:
    where = ["--run.root", str(tmp_path / "runs"), "--run.id", "case", "--train.duration", "5"]
    return run(tmp_path / "output", [*TINY, *where, *flags], launcher)


def _assert_said_once(done: Finished, message: str) -> None:
    assert done.returncode == 2, done
    output = done.stdout + done.stderr
    assert output.count("hvdtrain: error:") == 1 and output.count(message) == 1, done
    assert "Traceback" not in output, done


def test_typo_is_reported_once(tmp_path: Path) -> None:
    _assert_said_once(_fails(tmp_path, "mpirun:2", "--optim.lrr", "1"), "did you mean optim.lr?")


def test_glob_without_files_is_reported_once(tmp_path: Path) -> None:
    pattern = str(tmp_path / "none/*.txt")
    _assert_said_once(_fails(tmp_path, "gloo:2", "--data.train", pattern), f"matches '{pattern}'")


def test_unwritable_run_directory_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file: no directory can be created below it")
    _assert_said_once(_fails(tmp_path, "mpirun:2"), f"{tmp_path}/runs/case cannot be written")


def test_damaged_checkpoints_are_reported_once(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "alone", tmp_path / "runs/case")
    checkpoints = sorted((tmp_path / "runs/case/checkpoints").iterdir())
    for directory in checkpoints:
        content = bytearray((directory / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (directory / "model.safetensors").write_bytes(content)
    done = _fails(tmp_path, "gloo:2")
    _assert_said_once(done, "is intact")
    for directory in checkpoints:  # nothing is lost
        assert (
            directory / "complete"
        ).exists() and f"{directory}: model.safetensors" in done.stderr


# Under each launcher: tests/cluster (test_sixteen_ranks.py).
def test_error_on_one_rank_is_shown_and_ends_all_ranks(tmp_path: Path) -> None:
    flags = (
        f"--task tests.support.tasks:Failing --batch.global_size 4 --batch.micro_size 2"
        f" --eval.every 0 --telemetry.port 0 --run.root {tmp_path} --run.id case"
    )
    env = {"HVDTRAIN_TEST_FAIL": "1:5"}
    job = start(tmp_path / "output", flags.split(), "mpirun:2", env, forked_train(2))
    job.wait_for(INJECTED, timeout=100)
    done = job.wait(timeout=10)
    assert done.returncode == 1, done
    assert f"RuntimeError: {INJECTED}" in done.stdout + done.stderr, done
    assert [line["step"] for line in metrics(tmp_path / "case")] == [1, 2, 3, 4]

    def left() -> list[list[str]]:
        commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
        return [command for command in commands if str(tmp_path) in (command or ())]

    poll(lambda: not left(), 30, "the end of all processes")


def test_batchnorm_evaluation_does_not_depend_on_the_world_size(
    tmp_path: Path,
) -> None:
    task = ["--task", "tests.support.tasks:Paced", "--train.duration", "12", "--eval.every", "4"]
    size = ["--batch.global_size", "8", "--batch.micro_size", "2", "--telemetry.port", "0"]
    curves = {}
    for launcher in ("", "gloo:3"):
        where = ["--run.root", str(tmp_path), "--run.id", _name(launcher)]
        pace = {"HVDTRAIN_TEST_PACE": "0"}
        done = run(tmp_path / "output", [*task, *size, *where], launcher, pace)
        assert done.returncode == 0, done
        lines = metrics(tmp_path / _name(launcher))
        curves[launcher] = [
            line[name] for line in lines for name in ("loss", "validation_loss") if name in line
        ]
    assert len(curves[""]) == 12 + 3
    for curve in curves.values():
        assert curve == pytest.approx(curves[""], rel=1e-5)
