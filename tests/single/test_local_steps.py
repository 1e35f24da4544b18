"""exchange.sync_every: evaluation and checkpoints wait until the ranks are synchronized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.config import parse
from hvdtrain.errors import UserError
from tests.support.runs import TINY, losses, metrics, run, train, weights

STEPS, SAVED = 100, 56
LOCAL = ["--exchange.sync_every", "8"]
DILOCO = [*LOCAL, "--exchange.outer", "nesterov"]
FLAGS = ["--train.duration", str(STEPS), "--checkpoint.every", "50", "--checkpoint.keep", "9"]
CHECKPOINT = f"checkpoints/step_{SAVED:08}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    train(root, "dense", FLAGS, "gloo:2")
    train(root, "average", [*FLAGS, *LOCAL], "gloo:2")
    train(root, "diloco", [*FLAGS, *DILOCO, "--eval.every", "20"], "gloo:2")
    return root


def test_local_steps_match_dense_loss_and_send_fewer_bytes(root: Path) -> None:
    assert losses(root / "average")[-1] == pytest.approx(losses(root / "dense")[-1], rel=0.03)
    # Parameters and AdamW's two moments 13 times, instead of gradients 100 times.
    share = _bytes(root / "average") / _bytes(root / "dense")
    assert share == pytest.approx(3 * 13 / STEPS, rel=0.01)
    log = "".join(path.read_text() for path in (root / "average/logs").iterdir())
    assert "the curve depends on the number of ranks: exchange.sync_every 8" in log


def _bytes(directory: Path) -> int:
    lines = [json.loads(line) for line in (directory / "ranks.jsonl").read_text().splitlines()]
    return sum(line["bytes"][0] for line in lines)


def test_evaluation_and_checkpoints_wait_for_synchronization(root: Path) -> None:
    lines = metrics(root / "diloco")
    evaluated = [line["step"] for line in lines if "validation_loss" in line]
    assert evaluated == [24, 40, 64, 80, STEPS]
    # train.replica_check_every is 100, and saved states are compared.
    assert [line["step"] for line in lines if "state_hash" in line] == [SAVED, STEPS]
    saved = sorted(path.name for path in (root / "diloco/checkpoints").iterdir())
    assert saved == [f"step_{SAVED:08}", f"step_{STEPS:08}"]
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]


@pytest.mark.parametrize(("ranks", "same"), [(2, True), (1, False)])
def test_resumed_diloco_run_continues_loss_curve(root: Path, ranks: int, same: bool) -> None:
    flags = [*FLAGS, *DILOCO, "--run.resume", str(root / "diloco" / CHECKPOINT)]
    resumed = train(root, f"resumed-{ranks}", flags, f"gloo:{ranks}")
    whole = losses(root / "diloco")[SAVED:]
    assert losses(resumed)[0] == pytest.approx(whole[0], rel=1e-5)
    if same:
        assert losses(resumed) == whole
        assert weights(resumed, STEPS, 3) == weights(root / "diloco", STEPS, 3)


def test_stop_between_synchronizations_saves_consistent_checkpoint(
    root: Path,
) -> None:
    flags = [*TINY, *FLAGS, *DILOCO, "--task", "tests.support.tasks:Signalled"]
    flags += ["--run.root", str(root), "--run.id", "stopped", "--train.duration", "20"]
    # In the first micro-batch of step 11, with 2 per step.
    signal = {"HVDTRAIN_TEST_SIGNAL": "SIGUSR1:21"}
    done = run(root / "output", flags, "gloo:2", signal)
    assert done.returncode == 75, done
    step = metrics(root / "stopped")[-1]["step"]
    assert 11 <= step <= 13 and (root / f"stopped/checkpoints/step_{step:08}/complete").exists()
    assert "state_hash" in metrics(root / "stopped")[-1]
    done = run(root / "output", flags, "gloo:2", {"HVDTRAIN_TEST_SIGNAL": ""})
    assert done.returncode == 0, done
    lines = metrics(root / "stopped")
    assert [line["step"] for line in lines] == list(range(1, 21))


MISTAKES = {
    "--exchange.sync_every -1": "exchange.sync_every must be >= 0",
    "--exchange.sync_every 8 --exchange.name exact --runtime.threads 1": (
        "exchange.sync_every 8 excludes exchange.name exact"
    ),
    "--exchange.sync_every 8 --exchange.compression topk": (
        "exchange.sync_every 8 excludes exchange.compression topk"
    ),
    "--exchange.sync_every 8 --exchange.wire float16": "excludes exchange.wire float16",
    "--exchange.outer nesterov": "exchange.outer nesterov requires exchange.sync_every",
    "--exchange.sync_every 8 --exchange.outer_lr 0": "exchange.outer_lr must be > 0",
    "--exchange.sync_every 8 --exchange.outer_momentum 1": "outer_momentum must be in (0, 1)",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_conflicting_keys_are_rejected_in_one_sentence(flags: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(flags.split())
    message = str(caught.value)
    assert MISTAKES[flags] in message and "\n" not in message and caught.value.exit_code == 2
