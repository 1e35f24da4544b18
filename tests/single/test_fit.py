"""batch.micro_size auto: the largest micro-batch that fits, and when it cannot be found."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.process.fit import largest_that_fits
from tests.support.runs import TINY, losses, run

SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 192]


@given(
    slope=st.floats(1e-4, 2.0), at_least=st.floats(0.0, 1.2), bend=st.floats(0.0, 1e-3)
)  # more than linear: workspaces grow with the size
def test_largest_micro_batch_that_fits_is_found(slope: float, at_least: float, bend: float) -> None:
    tried: list[int] = []

    def share(size: int) -> float:
        tried.append(size)
        return at_least + slope * size + bend * size**2

    fitting = [size for size in SIZES if share(size) <= 1]
    tried.clear()
    found = largest_that_fits(SIZES, at_least, share)
    assert found == (fitting[-1] if fitting else None)
    assert len(tried) == len(set(tried))
    # A process that exceeds the memory would be killed, so sizes are tried upwards.
    for before, after in itertools.pairwise(tried):
        assert after <= 4 * before


def test_size_that_ran_out_of_memory_is_not_chosen() -> None:
    tried: list[int] = []

    def share(size: int) -> float:
        tried.append(size)
        return 0.2 if size < 10 else float("inf")

    assert largest_that_fits(SIZES, 0.1, share) == 8
    assert tried.count(12) == 1


@pytest.mark.parametrize("launcher", ["", "gloo:2"])
def test_fitting_keeps_the_curve_and_ranks_agree_on_the_size(tmp_path: Path, launcher: str) -> None:
    common = [*TINY, "--train.duration", "4", "--batch.global_size", "12", "--model.dropout", "0.1"]
    common += ["--run.root", str(tmp_path), "--telemetry.peak_flops", "1e12"]
    fit = ["--batch.micro_size", "1", "--batch.micro_size", "auto"]
    found = run(tmp_path / "o", [*common, "--run.id", "fit", *fit], launcher)
    assert found.returncode == 0, found
    size = 6 if launcher else 12  # there is memory for all sizes: each rank has one micro-batch
    assert found.stderr.count(f"batch.micro_size auto: {size}\n") == 1, found
    sized = ["--run.id", "sized", "--batch.micro_size", str(size)]
    assert run(tmp_path / "o", [*common, *sized], launcher).returncode == 0
    assert losses(tmp_path / "fit") == losses(tmp_path / "sized")
    start = json.loads((tmp_path / "fit/events.jsonl").read_text().splitlines()[0])
    assert start["micro_size"] == size


@pytest.mark.parametrize(
    ("task", "code", "message"),
    [
        ("LargeBeyondFour", 0, "batch.micro_size auto: 4\n"),
        (
            "Large",
            2,
            "error: batch.micro_size auto: not even one sample fits into memory. Try, in",
        ),
        ("Streamed", 2, "error: batch.micro_size auto reads samples before training"),
    ],
)
def test_fit_finds_a_size_or_reports_why_it_cannot(
    tmp_path: Path, task: str, code: int, message: str
) -> None:
    module = "unusual" if task == "Streamed" else "tasks"
    flags = ["--task", f"tests.support.{module}:{task}", "--batch.micro_size", "auto"]
    flags += ["--run.root", str(tmp_path), "--train.duration", "2", "--telemetry.port", "0"]
    done = run(tmp_path / "o", flags)
    assert done.returncode == code and message in done.stderr, done
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--exchange.name exact --runtime.threads 1",
            "auto excludes exchange.name exact: results would depend",
        ),
        ("--batch.max_tokens 99", "batch.max_tokens replaces batch.micro_size"),
    ],
)
def test_fit_rejects_conflicting_options(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse([*flags.split(), "--batch.micro_size", "auto"])
