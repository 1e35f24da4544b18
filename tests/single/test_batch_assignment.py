"""Assignment of a step's micro-batches to ranks of different speeds."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from hvdtrain.run_files.events_file import read_lines
from tests.support.runs import losses, metrics, run, weights

STEPS, MICRO_BATCHES = 30, 12
FLAGS = [
    *("--task", "tests.support.tasks:Uneven", "--batch.global_size", str(2 * MICRO_BATCHES)),
    *("--batch.micro_size", "2", "--train.duration", str(STEPS), "--telemetry.exchange_every", "3"),
    *("--telemetry.port", "0", "--checkpoint.every", str(STEPS)),
]
EXACT = ["--exchange.name", "exact", "--runtime.threads", "1"]


def _train(root: Path, name: str, flags: list[str], launcher: str, pace: str) -> Path:
    where = ["--run.root", str(root), "--run.id", name]
    env = {"HVDTRAIN_TEST_PACE": pace}
    done = run(root / f"{name}.out", [*FLAGS, *where, *flags], launcher, env)
    assert done.returncode == 0, done
    return root / name


@pytest.mark.parametrize(
    "flags", [pytest.param([], marks=pytest.mark.soak, id="dense"), pytest.param(EXACT, id="exact")]
)
def test_assignment_by_speed_shortens_steps_and_keeps_the_curve(
    tmp_path: Path, flags: list[str]
) -> None:
    alone = _train(tmp_path, "alone", flags, "", "0")
    by_speed = _train(tmp_path, "by_speed", [*flags, "--batch.deal", "speed"], "gloo:2", "0.03")
    assert losses(by_speed) == pytest.approx(losses(alone), rel=1e-6)
    if flags:
        assert weights(by_speed, STEPS) == weights(alone, STEPS)
    change, *_ = changes = [
        e for e in read_lines(by_speed / "events.jsonl") if e["event"] == "deal"
    ]
    # 8 and 4; on a busy machine the speeds differ by less.
    assert all(change["micro_batches"] in ([8, 4], [7, 5]) for change in changes), changes
    seconds = [line["step_seconds"] for line in metrics(by_speed)]
    before, after = median(seconds[2 : change["step"]]), median(seconds[change["step"] + 1 :])
    assert after < 0.9 * before, "8 and 4 take 2/3 of the time of 6 and 6"
    last, counts = list(read_lines(by_speed / "ranks.jsonl"))[-1], changes[-1]["micro_batches"]
    assert last["micro_batches"] == [count * last["steps"] for count in counts]
