"""Run length in epochs, and the samples at the end of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.process.resolve import Resolved, RunBuckets, with_steps
from hvdtrain.tasks import Datasets
from tests.support.runs import metrics, run

TASK = ["--task", "tests.support.tasks:Regression"]
SAMPLES = 256


@pytest.mark.parametrize(
    ("epochs", "size", "batch", "steps"),
    [(1, 100, 10, 10), (0.1, 1000, 10, 10), (0.3, 10, 1, 3), (3, 7, 4, 6), (0.001, 10, 4, 1)],
)
def test_epochs_are_converted_to_the_steps_that_all_samples_need(
    epochs: float, size: int, batch: int, steps: int
) -> None:
    flags = ["--train.duration", f"{epochs}epochs", "--batch.micro_size", "1"]
    config = parse([*flags, "--batch.global_size", str(batch)]).config
    train = with_steps(config, Datasets([0] * size)).train  # type: ignore[arg-type]
    assert (train.steps, train.epochs) == (steps, 0)


def test_description_of_the_run_length_is_accurate() -> None:
    config = parse(["--train.duration", "94", "--batch.global_size", "32"]).config
    said = Resolved(config, RunBuckets(), 1000).describe_length()
    assert said == "94 steps of 32 samples: 3.01 epochs of 1,000 samples"
    config = parse(["--train.duration", "1"]).config
    short = Resolved(config, RunBuckets(), 100_000).describe_length()
    assert short == "1 step of 32 samples: <0.01 epochs of 100,000 samples"
    unknown = Resolved(config, RunBuckets(), 0).describe_length()
    assert unknown == "1 step of 32 samples; the length of the data is unknown"


def test_last_specified_length_wins(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("train: {duration: 70}\n")
    epochs = tmp_path / "epochs.yaml"
    epochs.write_text("train: {duration: 2epochs}\n")
    for argv, expected in (
        (["--train.duration", "3epochs"], (0, 3)),  # over the task's own steps
        (["--config", str(file), "--train.duration=1.5epochs"], (0, 1.5)),
        (["--config", str(epochs), "--train.duration", "9"], (9, 0)),
        (["--config", str(file), "--config", str(epochs)], (0, 2)),
        (["--config", str(epochs), "--config", str(file)], (70, 0)),
    ):
        settings = parse(argv)
        assert (settings.config.train.steps, settings.config.train.epochs) == expected, argv
        (tmp_path / "again.yaml").write_text(settings.resolved)
        assert parse(["--config", str(tmp_path / "again.yaml")]) == settings


@pytest.mark.parametrize(
    "duration",
    [
        "-1epochs", "infepochs", "some epochs", "0epochs", "0", "-3 steps", "1.5", "2 passes", "",
    ],
)  # fmt: skip
def test_invalid_duration_is_rejected(duration: str) -> None:
    with pytest.raises(UserError, match=r"train.duration must be .* such as 3epochs, not"):
        parse([f"--train.duration={duration}"])


def test_run_of_epochs_equals_the_run_of_as_many_steps(tmp_path: Path) -> None:
    common = [*TASK, "--run.root", str(tmp_path), "--telemetry.port", "0", "--eval.every", "0"]
    common += ["--batch.global_size", "24", "--batch.micro_size", "12"]
    by_epochs = run(tmp_path / "o", [*common, "--run.id", "e", "--train.duration", "1.5epochs"])
    by_steps = run(tmp_path / "o", [*common, "--run.id", "s", "--train.duration", "16"])
    assert by_epochs.returncode == by_steps.returncode == 0, by_epochs
    ours, theirs = metrics(tmp_path / "e"), metrics(tmp_path / "s")
    assert [line["step"] for line in ours] == list(range(1, 17))
    for name in ("loss", "lr", "epoch"):
        assert [line[name] for line in ours] == [line[name] for line in theirs]
    assert ours[-1]["epoch"] == 16 * 24 / SAMPLES == 1.5
    assert "16 steps of 24 samples: 1.50 epochs of 256 samples" in by_epochs.stderr
    assert re.search(r"step 16/16  epoch 1.50  loss", by_epochs.stderr), by_epochs
    again = run(tmp_path / "o", [*common, "--run.id", "e", "--train.duration", "1.5epochs"])
    assert again.returncode == 0, again
    assert "nothing to do: the run has done 16 of 16 steps" in again.stderr


def test_profile_after_the_last_step_is_rejected(tmp_path: Path) -> None:
    flags = [
        *TASK,
        "--run.root",
        str(tmp_path),
        "--train.duration",
        "1epochs",
        "--profile.steps",
        "99:100",
    ]
    done = run(tmp_path / "o", [*flags, "--telemetry.port", "0"])
    assert done.returncode == 2 and "begins after the last step (train.duration 8)" in done.stderr
