"""Ranks that wait for a slow disk, or evaluate for long, are not named as stuck.

HVDTRAIN_SOAK_SECONDS: duration of the run (default 300).
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import runs, warm
from tests.support.own_loops import SCRIPTS

SECONDS = int(os.environ.get("HVDTRAIN_SOAK_SECONDS", "300"))
FLAGS = "--train.duration 100000 --batch.global_size 8 --batch.micro_size 2 --telemetry.port 0"


def test_slow_disks_and_long_evaluations_are_not_named_as_stuck(tmp_path: Path) -> None:
    command = [warm.python(2), str(SCRIPTS / "slow_parts.py"), str(SECONDS)]
    flags = [*FLAGS.split(), "--run.root", str(tmp_path), "--run.id", "case"]
    done = runs.start(tmp_path / "output", flags, "gloo:2", command=command).wait(SECONDS + 300)
    assert done.returncode == 0, done
    lines = runs.metrics(tmp_path / "case")
    evaluations = sum("validation_loss" in line for line in lines)
    print(f"{len(lines)} steps, {evaluations} evaluations in {SECONDS} s")
    assert evaluations >= SECONDS // 300
    reports = "".join(path.read_text() for path in (tmp_path / "case/logs").glob("hang_*"))
    assert "no progress" not in reports + done.stderr, reports
