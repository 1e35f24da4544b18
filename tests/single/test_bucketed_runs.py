"""Whole runs with batch.max_tokens, on several numbers of ranks and workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.data.buckets import SampleBuckets
from tests.support.ragged import TRAIN, Sentences
from tests.support.runs import metrics, run, weights

RAGGED = ["--task", "tests.support.ragged:Ragged", "--telemetry.port", "0", "--eval.every", "4"]
EXACT = ["--exchange.name", "exact", "--runtime.threads", "1"]


def _run(root: Path, name: str, launcher: str = "", *flags: str, code: int = 0) -> Path:
    where = ["--run.root", str(root), "--run.id", name]
    done = run(root / f"output-{name}", [*RAGGED, *where, *flags], launcher)
    assert done.returncode == code, done
    return root / name


def _curve(directory: Path) -> list[float]:
    lines = metrics(directory)
    return [v for line in lines for k, v in line.items() if k in ("loss", "validation_loss")]


def test_bucketed_curve_is_independent_of_ranks_workers_and_restarts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*EXACT, "--checkpoint.every", "4"]
    whole = _run(tmp_path, "whole", "", *flags, "--loader.workers", "2")
    three = _run(tmp_path, "three", "gloo:3")  # sums in another order
    assert _curve(three) == pytest.approx(_curve(whole), rel=1e-5)
    _run(tmp_path, "parts", "gloo:2", *flags, "--loader.workers", "4", "--train.duration", "4")
    parts = _run(tmp_path, "parts", "gloo:3", *flags)
    assert _curve(parts) == _curve(whole)
    assert weights(parts, 10) == weights(whole, 10)
    for directory in (whole, three, parts):
        assert cli.main(["audit", str(directory)]) == 0
    assert capsys.readouterr().out.count("150 samples; at every position the order") == 3
    first = metrics(whole)[0]
    used = SampleBuckets(Sentences(TRAIN).lengths, 90, 1234).used(range(6))
    assert (first["samples"], first["tokens"]) == (used.samples, used.tokens)
    assert first["padding"] == 1 - used.tokens / used.slots
    assert first["epoch"] == used.samples / TRAIN
    output = next((tmp_path / "output-whole").glob("*.stderr")).read_text()
    assert re.search(r"10 steps of 6 micro-batches: \d\.\d\d epochs of 150 samples", output)


def test_resume_rejects_token_budget_change(tmp_path: Path) -> None:
    flags = [*RAGGED, "--run.root", str(tmp_path), "--run.id", "one", "--checkpoint.every", "2"]
    assert run(tmp_path / "output", [*flags, "--train.duration", "2"]).returncode == 0
    done = run(tmp_path / "output", [*flags, "--batch.max_tokens", "80"])
    assert done.returncode == 2
    assert "batch.max_tokens was 90 at the checkpoint of step 2 and is 80 now" in done.stderr


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Averaged", "a task's loss(), gives the loss as (sum, number of tokens)"),
        ("Plain", "the training data (Tensor) has no `lengths`"),
    ],
)
def test_task_without_token_counts_or_lengths_is_rejected(
    tmp_path: Path, task: str, message: str
) -> None:
    flags = ["--task", f"tests.support.ragged:{task}", "--telemetry.port", "0"]
    flags += ["--batch.max_tokens", "90", "--run.root", str(tmp_path)]
    done = run(tmp_path / "output", flags)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
