"""A run of an earlier revision, tests/data/recorded, resumes, is audited and reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import REPOSITORY, losses, metrics, run

RECORDED = REPOSITORY / "tests/data/recorded"
STEPS, SAVED = 12, 6
FLAGS = (
    "--model.layers 1 --model.width 8 --model.heads 2 --model.context 16 --data.train LICENSE"
    " --batch.global_size 8 --batch.micro_size 2 --eval.every 3 --checkpoint.every 6"
    " --telemetry.port 0"
)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The run, in a separate directory of runs."""
    directory = tmp_path / "runs/recorded"
    shutil.copytree(RECORDED, directory)
    return directory


@pytest.mark.smoke
def test_checkpoint_resumes_with_the_same_curve(tmp_path: Path, recorded: Path) -> None:
    checkpoint = recorded / f"checkpoints/step_{SAVED:08}"
    where = ["--run.root", str(tmp_path), "--run.id", "new", "--run.resume", str(checkpoint)]
    done = run(tmp_path / "output", [*FLAGS.split(), *where, "--train.duration", str(STEPS)])
    assert done.returncode == 0, done
    before = [line for line in metrics(recorded) if line["step"] > SAVED]
    after = metrics(tmp_path / "new")
    assert losses(tmp_path / "new") == pytest.approx([line["loss"] for line in before], rel=1e-5)
    for name in ("grad_norm", "validation_loss"):
        expected = [line[name] for line in before if name in line]
        assert [line[name] for line in after if name in line] == pytest.approx(expected, rel=1e-4)


def test_run_can_be_resumed_audited_and_reported(tmp_path: Path, recorded: Path) -> None:
    where = ["--run.root", str(recorded.parent), "--run.id", recorded.name]
    done = run(tmp_path / "output", [*FLAGS.split(), *where, "--train.duration", str(STEPS + 3)])
    assert done.returncode == 0 and "resumed from the checkpoint of step 12" in done.stderr, done
    assert [line["step"] for line in metrics(recorded)] == list(range(1, STEPS + 4))
    for command in (["audit", str(recorded)], ["report", str(recorded), "--format", "json"]):
        done_with = subprocess.run(
            [sys.executable, "-m", "hvdtrain.cli", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done_with.returncode == 0, done_with
    assert json.loads(done_with.stdout)["steps"] == STEPS + 3
