"""Non-finite gradients: steps are skipped and counted, and the run ends if they persist."""

from __future__ import annotations

from pathlib import Path

import torch

from hvdtrain.checkpoint.format import read
from tests.support.job import Finished
from tests.support.runs import metrics, run

FLAGS = (
    "--task tests.support.tasks:NotFinite --batch.global_size 8 --batch.micro_size 2"
    " --checkpoint.every 1 --checkpoint.keep 20 --eval.every 0 --telemetry.port 0 --run.id case"
)


def _run(root: Path, bad_steps: str, *flags: str) -> Finished:
    arguments = [*FLAGS.split(), "--run.root", str(root), *flags]
    return run(root / "output", arguments, env={"HVDTRAIN_TEST_NAN": bad_steps})


def test_nonfinite_step_is_skipped_without_changing_state(tmp_path: Path) -> None:
    done = _run(tmp_path, "4,5")
    assert done.returncode == 0, done
    assert "2 steps were skipped" in done.stderr, done
    lines = metrics(tmp_path / "case")
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["step"] for line in lines if line.get("skipped")] == [4, 5]
    assert [line["step"] for line in lines if line["loss"] is None] == [4, 5]
    states = [read(tmp_path / f"case/checkpoints/step_{step:08}") for step in range(3, 7)]
    for skipped in states[1:3]:
        for part, before in states[0].parts.items():
            after = skipped.parts[part]
            assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    weights = [state.parts["model"]["weight"] for state in states]
    assert not torch.equal(weights[0], weights[3])
    assert states[3].state["nonfinite"] == 2 and states[3].state["nonfinite_in_a_row"] == 0
    assert states[2].state["nonfinite_in_a_row"] == 2 and states[2].state["samples"] == 40


def test_persistent_nonfinite_loss_exits_with_3(tmp_path: Path) -> None:
    done = _run(tmp_path, "3-", "--train.max_nonfinite", "4", "--train.duration", "50")
    assert done.returncode == 3, done
    message = done.stderr.strip().splitlines()[-1]
    assert "4 steps in a row, up to step 6" in message and "train.max_nonfinite" in message
    assert "Traceback" not in done.stderr
    assert [line["step"] for line in metrics(tmp_path / "case")] == list(range(1, 7))


def test_persistent_nonfinite_loss_ends_run_despite_loss_scale(tmp_path: Path) -> None:
    flags = "--precision.name fp16 --train.max_nonfinite 4 --train.duration 50"
    done = _run(tmp_path, "3-", *flags.split())
    assert done.returncode == 3, done
    # The first two steps always overflow. One is tolerated, 16 reduce the scale from 65536 to 1.
    message = done.stderr.strip().splitlines()[-1]
    assert "4 steps in a row, up to step 21" in message, done
    lines = metrics(tmp_path / "case")
    assert [line["loss_scale"] for line in lines[:4]] == [2.0**16, 2.0**16, 2.0**15, 2.0**14]
    assert [line["step"] for line in lines if line.get("overflow")] == list(range(1, 18))
    assert [line["step"] for line in lines if line.get("skipped")] == list(range(1, 22))
    assert lines[-1]["loss_scale"] == 1
    newest = read(tmp_path / "case/checkpoints/step_00000021")
    assert newest.parts["loss_scale"]["scale"] == 1 and newest.state["nonfinite"] == 4


def test_skipped_step_keeps_batchnorm_statistics_finite(tmp_path: Path) -> None:
    # An epoch has 32 steps; one of them has the NaN sample.
    flags = "--task tests.support.unusual:Poisoned --train.duration 32 --eval.every 32"
    done = _run(tmp_path, "", *flags.split(), "--checkpoint.every", "32")
    assert done.returncode == 0, done
    lines = metrics(tmp_path / "case")
    assert sum(line.get("skipped", False) for line in lines) == 1
    assert lines[-1]["validation_loss"] is not None  # null: not finite
    saved = read(tmp_path / "case/checkpoints/step_00000032").parts["model"]
    assert all(tensor.isfinite().all() for tensor in saved.values())
