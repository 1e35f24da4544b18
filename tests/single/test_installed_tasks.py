"""Tasks of installed packages, and a task's own optimizer and learning rates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import runs

TASK = '''
import torch
from torch import nn
from hvdtrain.tasks import Datasets


class Line:
    """A line through random points."""

    defaults = {"train.duration": 4, "batch.global_size": 8, "batch.micro_size": 4}

    def datasets(self):
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
        return Datasets([*zip(x, x.sum(1, keepdim=True))])

    def model(self):
        return nn.Linear(3, 1)

    def loss(self, model, batch):
        return {"loss": (model(batch[0]) - batch[1]).square().mean()}

    def optimizer(self, model):
        return torch.optim.RMSprop(model.parameters() if PARAMETERS else [model.weight])

    def schedule(self, step):
        return 0.1 / (step + 1)

    def callbacks(self):
        return [BestLoss()]


class BestLoss:
    best = float("inf")

    def on_step(self, record):
        self.best = min(self.best, record["loss"])
        return {"best_loss": self.best}
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A directory with an installed package that has the task `line`."""
    (tmp_path / "lines.py").write_text(TASK.replace("PARAMETERS", "True"))
    info = tmp_path / "lines-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hvdtrain.tasks]\nline = lines:Line\n")
    return tmp_path


def hvdtrain(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(package), str(runs.REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=runs.environment({"PYTHONPATH": path}),
    )


def test_task_of_a_package_is_listed_and_trained_by_its_name(package: Path) -> None:
    listed = hvdtrain(package, "tasks")
    assert re.search(r"^line +A line through random points. \[lines:Line\]", listed.stdout, re.M)
    assert "language_model  " in listed.stdout
    where = ["--run.root", str(package), "--run.id", "a", "--telemetry.port", "0"]
    done = hvdtrain(package, "train", "--task", "line", *where)
    assert done.returncode == 0, done.stderr
    rates = [line["lr"] for line in runs.metrics(package / "a")]
    assert rates == [0.1, 0.05, pytest.approx(0.1 / 3), 0.025]
    best = [line["best_loss"] for line in runs.metrics(package / "a")]
    losses = [line["loss"] for line in runs.metrics(package / "a")]
    assert best == [min(losses[: number + 1]) for number in range(4)]


def test_unknown_task_is_refused_with_the_names_of_all(package: Path) -> None:
    done = hvdtrain(package, "train", "--task", "lime")
    assert done.returncode == 2
    assert "no task is called 'lime'; there are language_model" in done.stderr
    assert ", line;" in done.stderr


def test_optimizer_that_lacks_parameters_is_refused(package: Path) -> None:
    (package / "lines.py").write_text(TASK.replace("PARAMETERS", "False"))
    where = ["--run.root", str(package), "--run.id", "a", "--telemetry.port", "0"]
    done = hvdtrain(package, "train", "--task", "line", *where)
    assert done.returncode == 2
    assert "the optimizer lacks 1 trained parameters of the model, such as bias" in done.stderr
