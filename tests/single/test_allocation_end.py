"""A run ends before the scheduler's time limit, with a checkpoint.

tests/cluster/test_slurm.py has the same under a real Slurm.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from hvdtrain.engine.callbacks import allocation
from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.runtime.allocation import parse_time_left
from hvdtrain.runtime.signals import StopFlag
from tests.support import runs
from tests.support.job import poll

if TYPE_CHECKING:
    from hvdtrain.engine.loop import Loop


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:07", 7),
        ("59:59", 3599),
        ("2:00:00", 7200),
        ("1-02:03:04", 93784),
        ("UNLIMITED", math.inf),
        ("INVALID", None),
        ("", None),
    ],
)
def test_time_left_is_read_as_slurm_writes_it(text: str, seconds: float | None) -> None:
    assert parse_time_left(text) == seconds


@pytest.mark.parametrize(("left", "code"), [("0:20", EXIT_PREEMPTED), ("UNLIMITED", 0)])
def test_run_stops_with_a_checkpoint_before_its_time_limit(
    tmp_path: Path, left: str, code: int
) -> None:
    squeue = tmp_path / "bin/squeue"  # stands for Slurm's
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\necho 1 {left}\necho 2 9:00\n")
    squeue.chmod(0o755)
    slow = tmp_path / "slow"
    if code:
        slow.touch()
    env = {
        "SLURM_JOB_ID": "1",
        "PATH": f"{squeue.parent}:{runs.environment()['PATH']}",
        "HVDTRAIN_TEST_SLOW": f"0.1:{slow}",
    }
    flags = [*runs.TINY, "--task", "tests.support.tasks:SlowWhile", "--train.duration", "100"]
    where = ["--run.root", str(tmp_path), "--run.id", "a"]
    done = runs.run(tmp_path / "output", [*flags, *where], "gloo:2", env)
    assert done.returncode == code, done
    steps = len(runs.losses(tmp_path / "a"))
    assert (steps < 100) == bool(code) == ("time limit is" in done.stderr), done
    assert (tmp_path / f"a/checkpoints/step_{steps:08}").is_dir()


def test_known_time_limit_is_kept_while_the_scheduler_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [20.0, None, None]
    monkeypatch.setattr(allocation, "_ASK_SECONDS", 0.0)
    monkeypatch.setattr(allocation, "_LOOK_SECONDS", 0.01)
    stop, began = StopFlag(), time.monotonic()
    end = allocation.StopBeforeEnd(lambda: answers.pop(0) if answers else None, lambda: 4, 5, stop)
    try:
        poll(lambda: not answers, 20, "the answers")
        end.on_step(cast("Loop", None), {})
    finally:
        end.close()
    # With 5 s of grace, the end is as far away as if the request had come 15 s later.
    assert stop.raised_at is not None and stop.raised_at == pytest.approx(began + 15, abs=2)
