"""batch.per_rank_size: a global batch that scales with the world size."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.process.resolve import with_global_batch
from tests.support.job import Job
from tests.support.runs import environment, forked_train, metrics, run

COMMON = ["--task", "tests.support.tasks:Regression", "--telemetry.port", "0"]
COMMON += ["--batch.micro_size", "4"]


@pytest.mark.parametrize(("rule", "lr"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_learning_rate_follows_scaling_rule(rule: str, lr: float) -> None:
    flags = ["--batch.per_rank_size", "12", "--optim.lr", "0.1", "--optim.scale_lr", rule]
    config = with_global_batch(parse(flags).config, 4)
    assert config.batch.global_size == 48 and config.batch.micro_batches == 12
    assert config.optim.lr == pytest.approx(lr)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch.per_rank_size", "10"], r"batch.per_rank_size 10 is not a multiple of .* 4; .*5"),
        (["--batch.per_rank_size", "-4"], r"batch.per_rank_size must be >= 0"),
        (["--optim.scale_lr", "linear"], r"optim.scale_lr linear requires batch.per_rank_size"),
    ],
)
def test_invalid_per_rank_batch_is_rejected(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(flags)


def test_per_rank_batches_match_one_rank_with_global_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*COMMON, "--run.root", str(tmp_path), "--train.duration", "1epochs"]
    grown = ["--batch.per_rank_size", "16", "--optim.lr", "0.01", "--optim.scale_lr", "linear"]
    two = run(tmp_path / "o", [*common, "--run.id", "two", *grown], "gloo:2")
    whole = ["--batch.global_size", "32", "--optim.lr", "0.02"]
    one = run(tmp_path / "o", [*common, "--run.id", "one", *whole])
    assert two.returncode == one.returncode == 0, two
    for ours, theirs in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        for name in {"loss", "lr", "samples", "epoch", "validation_loss"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    start = json.loads((tmp_path / "two/events.jsonl").read_text().splitlines()[0])
    assert (start["global_size"], start["total_steps"]) == (32, 8)
    said = "the curve depends on the number of ranks: batch.per_rank_size 16 with optim.scale_lr"
    assert said in two.stderr
    assert cli.main(["audit", str(tmp_path / "two")]) == 0
    assert f"{said} linear" in capsys.readouterr().out
    alone = run(tmp_path / "o", [*common, "--run.id", "two", *grown])
    assert alone.returncode == 2, alone
    assert "batch.global_size was 32 at the checkpoint of step 8 and is 16 now" in alone.stderr


def test_elastic_run_rejects_per_rank_batch(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:2\n")
    launcher = shlex.split(
        "horovodrun --gloo -np 2 --min-np 1 --max-np 2 --network-interfaces lo"
        f" --host-discovery-script 'cat {tmp_path}/hosts'"
    )
    keys = [*COMMON, "--run.root", str(tmp_path), "--batch.per_rank_size", "4"]
    command = [*launcher, *forked_train(2), *keys]
    done = Job([], command, environment({}), tmp_path / "job").wait(120)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "Traceback" not in output, done
    assert output.count("hvdtrain: error: batch.per_rank_size derives the global batch") == 1
