"""Only the largest elements of a gradient travel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hvdtrain.checkpoint.format import read_files_of_ranks
from hvdtrain.cli import main
from hvdtrain.exchange.topk import Residuals
from tests.support.runs import TINY, losses, run, train, weights

STEPS, HALF = 100, 50
FLAGS = ["--train.steps", str(STEPS), "--checkpoint.every", str(HALF)]
TOPK = [*FLAGS, "--exchange.compression", "topk", "--exchange.ratio", "0.1"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    train(root, "dense", FLAGS, "gloo:2")
    train(root, "topk", TOPK, "gloo:2")
    return root


def test_a_tenth_of_the_gradient_learns_less_or_sends_more(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, topk = losses(root / "dense"), losses(root / "topk")
    assert topk[-1] == pytest.approx(dense[-1], rel=0.03)
    assert topk != dense
    # Indices and values are 8 bytes for each of a tenth of the elements of 4.
    assert _bytes(root / "topk") == pytest.approx(0.2 * _bytes(root / "dense"), rel=0.01)
    assert main(["audit", str(root / "topk")]) == 0
    assert "depends on the number of ranks: exchange.compression topk" in capsys.readouterr().out
    logs = "".join(path.read_text() for path in (root / "topk/logs").iterdir())
    assert "the curve depends on the number of ranks" in logs


def _bytes(folder: Path) -> int:
    lines = [json.loads(line) for line in (folder / "ranks.jsonl").read_text().splitlines()]
    return sum(line["bytes"][0] for line in lines)


def test_a_resumed_run_owes_something_else(root: Path) -> None:
    checkpoint = root / f"topk/checkpoints/step_{HALF:08}"
    resumed = train(root, "resumed", [*TOPK, "--run.resume", str(checkpoint)], "gloo:2")
    assert losses(resumed) == losses(root / "topk")[HALF:]
    assert weights(resumed, STEPS, files=4) == weights(root / "topk", STEPS, files=4)
    alone = train(root, "alone", [*TOPK, "--run.resume", str(checkpoint)])
    assert losses(alone)[0] == pytest.approx(losses(root / "topk")[HALF], rel=1e-5)


def test_one_rank_that_inherits_from_two_owes_less_than_both(root: Path) -> None:
    checkpoint = root / f"topk/checkpoints/step_{HALF:08}"
    pieces = list(read_files_of_ranks(checkpoint, lambda rank: True).parts.values())
    assert len(pieces) == 2 and all(t.any() for piece in pieces for t in piece.values())
    names = sorted(pieces[0], key=lambda name: int(name.rpartition(".")[2]))
    residuals = Residuals([torch.ones_like(pieces[0][name]) for name in names])
    residuals.load(pieces)
    for name, tensor in residuals.tensors().items():
        assert torch.equal(tensor, pieces[0][name] + pieces[1][name])
    residuals.load([])
    assert not any(tensor.any() for tensor in residuals.tensors().values())


TOPK_FLAG = "--exchange.compression topk"
MISTAKES = {
    f"{TOPK_FLAG} --exchange.name exact --runtime.threads 1": "excludes exchange.name exact",
    f"{TOPK_FLAG} --exchange.wire float16": "exchange.wire float16 is for",
    f"{TOPK_FLAG} --exchange.ratio 0": "exchange.ratio must be in (0, 1], not 0.0",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_keys_that_exclude_each_other_are_not_one_sentence(tmp_path: Path, flags: str) -> None:
    done = run(tmp_path, [*TINY, *flags.split()])
    assert done.returncode == 2 and MISTAKES[flags] in done.stderr, done
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, done
