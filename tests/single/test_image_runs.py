"""End-to-end runs of the task `image`: it learns, with one loss curve on any world size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.datasets import cut_off, draw
from tests.support.job import Finished
from tests.support.runs import losses, metrics, run

# Random shifts, mixup, BatchNorm and 6 micro-batches per step. Few steps, because each multiplies
# rounding differences of the sums by about five.
CURVE = (
    "--task image --image.mixup 0.2 --image.label_smoothing 0.1 --batch.global_size 48"
    " --batch.micro_size 8 --train.duration 6 --eval.every 6 --telemetry.port 0"
)
DIRECTORY = (
    "--task image --image.model resnet8 --image.size 16 --batch.global_size 8"
    " --batch.micro_size 4 --train.duration 12 --telemetry.port 0"
)


def _train(root: Path, name: str, flags: str, launcher: str = "") -> Finished:
    where = f"--run.root {root} --run.id {name}"
    return run(root / "output", f"{flags} {where}".split(), launcher, timeout=180)


@pytest.mark.soak
def test_digits_preset_reaches_97_percent_accuracy(tmp_path: Path) -> None:
    flags = "--config digits --train.duration 200 --telemetry.port 0"
    done = _train(tmp_path, "digits", flags)
    assert done.returncode == 0 and " seen as " in done.stdout, done
    assert metrics(tmp_path / "digits")[-1]["validation_top1"] > 0.97


def test_augmentation_and_batchnorm_are_independent_of_world_size(tmp_path: Path) -> None:
    for name, launcher in (("alone", ""), ("ranks", "gloo:3")):
        done = _train(tmp_path, name, CURVE, launcher)
        assert done.returncode == 0, done
    alone = tmp_path / "alone"
    assert losses(tmp_path / "ranks") == pytest.approx(losses(alone), rel=1e-5)
    last, expected = metrics(tmp_path / "ranks")[-1], metrics(alone)[-1]
    for key in ("top1", "top5", "validation_loss", "validation_top1", "validation_top5"):
        assert last[key] == pytest.approx(expected[key], rel=1e-5), key


def test_image_directory_is_learned(tmp_path: Path) -> None:
    directory = draw(tmp_path / "pictures", 10)
    done = _train(tmp_path, "directory", f"{DIRECTORY} --data.train {directory}")
    assert done.returncode == 0, done
    assert losses(tmp_path / "directory")[-1] < 0.5 * losses(tmp_path / "directory")[0]


def test_broken_image_is_named_and_run_resumes_after_repair(tmp_path: Path) -> None:
    broken = cut_off(draw(tmp_path / "pictures", 10) / "red" / "003.jpg")
    done = _train(tmp_path, "broken", f"{DIRECTORY} --data.train {broken.parents[1]}", "mpirun:2")
    assert done.returncode == 2, done
    assert f"image {broken} cannot be read (" in done.stderr and "Traceback" not in done.stderr
    broken.write_bytes(broken.with_name("005.jpg").read_bytes())
    again = _train(tmp_path, "broken", f"{DIRECTORY} --data.train {broken.parents[1]}", "mpirun:2")
    assert again.returncode == 0 and metrics(tmp_path / "broken")[-1]["step"] == 12, again
