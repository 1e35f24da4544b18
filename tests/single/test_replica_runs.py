"""Real runs in which a bit of one rank's state flips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import Finished
from tests.support.runs import losses, metrics, run, weights

STEPS, CHECK = 17, 5
FLAGS = [
    *("--task", "tests.support.tasks:Flipped", "--batch.global_size", "6"),
    *("--batch.micro_size", "2", "--telemetry.port", "0", "--eval.every", "0"),
    *("--train.duration", str(STEPS), "--train.log_every", "1", "--checkpoint.every", "0"),
    *("--train.replica_check_every", str(CHECK), "--run.id", "run"),
]
NEVER = "0:0:weight"


def _run(root: Path, flip: str, *flags: str, ranks: int = 3) -> Finished:
    flags = (*FLAGS, "--run.root", str(root), *flags)
    return run(root / "output", flags, f"gloo:{ranks}", {"HVDTRAIN_TEST_FLIP": flip})


def _healed(directory: Path) -> list[tuple[int, Any]]:
    return [(line["step"], line["healed"]) for line in metrics(directory) if "healed" in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run without flipped bits."""
    root = tmp_path_factory.mktemp("whole")
    done = _run(root, NEVER, "--checkpoint.every", "5", "--checkpoint.keep", "4")
    assert done.returncode == 0, done
    assert _healed(root / "run") == [], done
    return root / "run"


def test_flipped_bits_are_healed_before_losses_or_checkpoints_change(
    whole: Path, tmp_path: Path
) -> None:
    # Each is healed at once, so all later losses are bitwise identical.
    flags = ["--checkpoint.every", "5", "--checkpoint.keep", "4"]
    done = _run(tmp_path, "1:5:weight,0:10:exp_avg_sq,2:15:step", *flags)
    assert done.returncode == 0, done
    directory = tmp_path / "run"
    assert _healed(directory) == [(5, [1]), (10, [0]), (15, [2])], done
    for step, rank in ((5, 1), (10, 0), (15, 2)):
        named = f"step {step}: parameters or optimizer state of rank {rank} on "
        assert named in done.stderr, done
    assert losses(directory) == losses(whole)
    for step in (5, 10, 15, STEPS):
        assert weights(directory, step) == weights(whole, step)


def test_healing_is_logged_and_ranks_are_identical_afterwards(whole: Path, tmp_path: Path) -> None:
    done = _run(tmp_path, "2:7:weight", "--train.log_every", "6", "--checkpoint.every", "17")
    assert done.returncode == 0, done
    directory = tmp_path / "run"
    assert [line["step"] for line in metrics(directory)] == [6, 10, 12, 17]
    assert _healed(directory) == [(10, [2])], done  # and no longer in the last step
    assert "gradients of the steps since 5 may have been wrong" in done.stderr, done
    before, *after = losses(directory)
    expected = [losses(whole)[step - 1] for step in (10, 12, 17)]
    assert before == losses(whole)[5] and after != expected
    assert after == pytest.approx(expected, rel=1e-2)


def test_two_diverged_ranks_stop_without_a_checkpoint_and_resume(tmp_path: Path) -> None:
    done = _run(tmp_path, "1:7:weight", "--checkpoint.every", "5", ranks=2)
    assert done.returncode == 1, done
    message = "step 10: parameters or optimizer state differ between 2 groups of ranks (rank 0 on "
    assert done.stderr.count(message) == 1 and "Traceback" not in done.stderr, done
    finished = sorted(p.parent.name for p in (tmp_path / "run/checkpoints").glob("step_*/complete"))
    assert finished == ["step_00000005"]
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["restarts"] == 0
    again = _run(tmp_path, NEVER, "--checkpoint.every", "5", ranks=2)
    assert again.returncode == 0, again
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
