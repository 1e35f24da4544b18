"""Early stopping on the validation loss, and retention of the best checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.checkpoint.layout import best, finished
from hvdtrain.config import parse
from hvdtrain.engine.loop import is_best, since_best, with_evaluation
from hvdtrain.errors import UserError
from hvdtrain.process.resolve import with_steps
from hvdtrain.tasks import Datasets
from tests.support.job import Finished
from tests.support.runs import metrics, run

COMMON = [
    *(
        "--task",
        "tests.support.tasks:Overfitted",
        "--telemetry.port",
        "0",
        "--train.duration",
        "200",
    ),
    *("--schedule.warmup_steps", "0", "--optim.lr", "0.02", "--optim.weight_decay", "0"),
    *("--eval.every", "5", "--train.patience", "3", "--checkpoint.keep_best", "true"),
    *("--checkpoint.every", "5", "--checkpoint.keep", "1"),
]


def _run(root: Path, name: str, *flags: str, launcher: str = "") -> Finished:
    where = ["--run.root", str(root), "--run.id", name]
    return run(root / "output", [*COMMON, *where, *flags], launcher)


def _history(*losses: float) -> list[list[float]]:
    found: list[list[float]] = []
    for step, loss in enumerate(losses, start=1):
        found = with_evaluation(found, step, loss)
    return found


def test_evaluations_since_the_lowest_loss_are_counted() -> None:
    assert since_best([]) == 0 and not is_best([], 0)
    assert since_best(_history(3, 2, 2, float("nan"))) == 2
    assert _history(3, 2, 2, float("nan")) == [[2, 2], [3, 2], [4, None]]
    assert since_best(_history(float("nan"), float("inf"))) == 1
    assert is_best(_history(3, 2), 2) and not is_best(_history(3, 2), 3)
    assert not is_best(_history(3, 3), 2) and not is_best(_history(float("nan")), 1)


def test_step_that_is_evaluated_again_counts_once() -> None:
    seen = _history(3, 1, 2, 2.5)
    unseen = _history(3, 1, 2)
    # After a failure the ranks evaluate together, and sum in another order.
    assert with_evaluation(seen, 4, 2.6) == with_evaluation(unseen, 4, 2.6)
    seen, unseen = _history(3, 1, 0.9), _history(3, 1)
    assert with_evaluation(seen, 3, 1.1) == with_evaluation(unseen, 3, 1.1)
    assert since_best(with_evaluation(seen, 3, 1.1)) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train.patience", "-1"], r"train.patience must be >= 0"),
        (["--train.patience", "2", "--eval.every", "0"], r"patience 2 excludes eval.every 0"),
        (
            ["--checkpoint.keep_best", "true", "--eval.every", "0"],
            r"keep_best excludes eval.every 0",
        ),
    ],
)
def test_early_stopping_that_cannot_trigger_is_rejected(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(flags)


def test_early_stopping_works_on_two_ranks_and_after_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = _run(tmp_path, "one")
    assert done.returncode == 0, done
    lines = metrics(tmp_path / "one")
    losses = {m["step"]: m["validation_loss"] for m in lines if "validation_loss" in m}
    lowest = min(losses, key=lambda step: losses[step])
    last = lines[-1]["step"]
    assert last == lowest + 15 < 200, losses
    assert f"lowest after step {lowest}, 3 evaluations ago: the run ends here" in done.stderr
    checkpoints = tmp_path / "one/checkpoints"
    assert [int(path.name[5:]) for path in finished(checkpoints)] == [lowest, last]
    kept = best(finished(checkpoints))
    assert kept is not None and kept.name == f"step_{lowest:08}"
    assert cli.main(["ckpt", "list", str(tmp_path / "one")]) == 0
    listed = capsys.readouterr().out.splitlines()
    marked = [line for line in listed if f"best: validation loss {losses[lowest]:.4f}" in line]
    assert len(marked) == 1 and kept.name in marked[0], listed
    assert cli.main(["audit", str(tmp_path / "one")]) == 0, capsys.readouterr().out

    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "one"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "stopped early"

    two = _run(tmp_path, "two", launcher="gloo:2")
    assert two.returncode == 0, two
    assert metrics(tmp_path / "two")[-1]["step"] == last

    # Interrupted between the lowest loss and the stop: the count is in the checkpoint.
    half = _run(
        tmp_path, "half", "--train.duration", str(lowest + 5), "--schedule.name", "constant"
    )
    assert half.returncode == 0, half
    again = _run(tmp_path, "half", "--schedule.name", "constant")
    assert again.returncode == 0, again
    ours = metrics(tmp_path / "half")
    found = {m["step"]: m["validation_loss"] for m in ours if "validation_loss" in m}
    assert ours[-1]["step"] == min(found, key=lambda step: found[step]) + 15
    ended = _run(tmp_path, "half", "--schedule.name", "constant")
    assert ended.returncode == 0 and "nothing to do: the run has done" in ended.stderr, ended
    assert cli.main(["audit", str(tmp_path / "half")]) == 0, capsys.readouterr().out
    events = (tmp_path / "half/events.jsonl").read_text().splitlines()
    stops = [json.loads(line) for line in events if "early_stop" in line]
    assert [stop["step"] for stop in stops] == [ours[-1]["step"]]


def test_early_stopping_requires_validation_data() -> None:
    for flags in (["--train.patience", "2"], ["--checkpoint.keep_best", "true"]):
        key = flags[0].removeprefix("--")
        with pytest.raises(UserError, match=f"{key} requires validation data, and the task"):
            with_steps(parse(flags).config, Datasets([0] * 64))  # type: ignore[arg-type]
