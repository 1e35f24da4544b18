"""Compressed gradients: nearly the uncompressed curve, and no residual is lost."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hvdtrain.checkpoint.format import read_files_of_ranks
from hvdtrain.cli import main
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState
from hvdtrain.exchange.base import Exchange
from hvdtrain.exchange.bucketed import Residuals
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.exchange.dense import DenseExchange
from hvdtrain.exchange.powersgd import orthonormal, powersgd_exchange
from hvdtrain.runtime.init import initialize
from tests.support.runs import TINY, TRAIN, environment, losses, run, start, train, weights

STEPS, HALF = 100, 50
FLAGS = ["--train.duration", str(STEPS), "--checkpoint.every", str(HALF)]
FLAGS_OF = {
    "dense": FLAGS,
    "topk": [*FLAGS, *["--exchange.compression", "topk", "--exchange.ratio", "0.1"]],
    "powersgd": [*FLAGS, *["--exchange.compression", "powersgd", "--exchange.rank", "4"]],
}
COMPRESSIONS = ["topk", "powersgd"]
CHECKPOINT = f"checkpoints/step_{HALF:08}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name, flags in FLAGS_OF.items():
        train(root, name, flags, "gloo:2")
    return root


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compressed_run_learns_and_reports_rank_dependence(
    root: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, compressed = losses(root / "dense"), losses(root / name)
    assert compressed[-1] == pytest.approx(dense[-1], rel=0.03)
    assert compressed != dense
    assert main(["audit", str(root / name)]) == 0
    said = f"the curve depends on the number of ranks: exchange.compression {name}"
    assert said in capsys.readouterr().out
    assert said in "".join(path.read_text() for path in (root / name / "logs").iterdir())


def test_compression_sends_the_expected_number_of_bytes(root: Path) -> None:
    # Indices and values are 8 bytes for a tenth of the elements, which have 4 bytes.
    assert _bytes(root / "topk") == pytest.approx(0.2 * _bytes(root / "dense"), rel=0.01)
    # The first 10 of 100 steps send everything; here rank 4 of 32 x 128 is about a fifth.
    assert 0.1 < _bytes(root / "powersgd") / _bytes(root / "dense") < 0.5


def _bytes(directory: Path) -> int:
    lines = [json.loads(line) for line in (directory / "ranks.jsonl").read_text().splitlines()]
    return sum(line["bytes"][0] for line in lines)


@pytest.mark.parametrize(("name", "files"), [("topk", 4), ("powersgd", 5)])
def test_resumed_compressed_run_is_bitwise_identical(root: Path, name: str, files: int) -> None:
    flags = [*FLAGS_OF[name], "--run.resume", str(root / name / CHECKPOINT)]
    resumed = train(root, f"resumed-{name}", flags, "gloo:2")
    assert losses(resumed) == losses(root / name)[HALF:]
    assert weights(resumed, STEPS, files) == weights(root / name, STEPS, files)


def test_resume_on_fewer_ranks_sums_their_residuals(root: Path) -> None:
    checkpoint = root / "topk" / CHECKPOINT
    saved = list(read_files_of_ranks(checkpoint, lambda rank: True).parts.values())
    assert len(saved) == 2 and all(t.any() for one in saved for t in one.values())
    names = sorted(saved[0], key=lambda name: int(name.rpartition(".")[2]))
    residuals = Residuals([torch.ones_like(saved[0][name]) for name in names])
    residuals.load(saved)
    for name, tensor in residuals.tensors().items():
        assert torch.equal(tensor, saved[0][name] + saved[1][name])
    residuals.load([])
    assert not any(tensor.any() for tensor in residuals.tensors().values())
    flags = [*FLAGS_OF["topk"], "--run.resume", str(checkpoint)]
    alone = train(root, "alone", flags)
    assert losses(alone)[0] == pytest.approx(losses(root / "topk")[HALF], rel=1e-5)


@pytest.mark.parametrize("name", ["float16", "powersgd"])
def test_start_over_resets_the_exchange_state(name: str) -> None:
    initialize()
    model = torch.nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange: Exchange = (
        DenseExchange(optimizer, model, False, "float16")
        if name == "float16"
        else powersgd_exchange(optimizer, model, ExchangeConfig(compression="powersgd"))
    )
    state = RunState(model, optimizer, Progress(), {}, exchange.state_parts())
    before = {key: tensor.clone() for key, tensor in _carried(state).items()}
    for tensor in _carried(state).values():
        tensor += 7
    state.start_over(torch.nn.Linear(20, 20))
    assert before and all(torch.equal(t, before[key]) for key, t in _carried(state).items())


def test_rank_that_was_a_step_behind_drops_its_residuals() -> None:
    model = torch.nn.Linear(2, 2)
    residual = Residuals([torch.ones(3)])
    state = RunState(model, torch.optim.SGD(model.parameters(), lr=0.1), Progress(), {}, [residual])
    state.drop_local()
    assert residual.norm() == 0


def _carried(state: RunState) -> dict[str, torch.Tensor]:
    return {key: tensor for part in state.further for key, tensor in part.tensors().items()}


TOPK_FLAG = "--exchange.compression topk"
MISTAKES = {
    f"{TOPK_FLAG} --exchange.name exact --runtime.threads 1": "excludes exchange.name exact",
    f"{TOPK_FLAG} --exchange.wire float16": "excludes exchange.wire float16",
    f"{TOPK_FLAG} --exchange.ratio 0": "exchange.ratio must be in (0, 1], not 0.0",
    "--exchange.compression powersgd --exchange.rank 0": "exchange.rank must be >= 1, not 0",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_conflicting_keys_are_a_one_line_error(tmp_path: Path, flags: str) -> None:
    done = run(tmp_path, [*TINY, *flags.split()])
    assert done.returncode == 2 and MISTAKES[flags] in done.stderr, done
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, done


ON_A_PROCESSOR = """
import hashlib, torch
from hvdtrain.exchange.powersgd import orthonormal, product
numbers = [torch.arange(n * 4, dtype=torch.float32).mul(0.7).frac().view(n, 4) for n in (1000, 333)]
ps = orthonormal(numbers)
out = torch.empty(1000, 333)
product(ps[0], numbers[1], out)
library = torch.linalg.qr(numbers[0]).Q @ numbers[1].t()
for tensor in (*ps, out, library):
    print(hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_powersgd_is_bitwise_identical_across_processor_types() -> None:
    found = []
    for unlike in ({}, {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}):
        command = [sys.executable, "-c", ON_A_PROCESSOR]
        env = environment(unlike)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        found.append(done.stdout.split())
        assert len(found[-1]) == 4, done
    assert found[0][:3] == found[1][:3]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["ATEN_CPU_CAPABILITY=default", "MKL_CBWR=COMPATIBLE"])
def test_ranks_on_different_processors_agree_or_refuse_to_start(tmp_path: Path, other: str) -> None:
    # Rank 1 computes as on another processor.
    rank = tmp_path / "rank.sh"
    rank.write_text(
        f'#!/bin/sh\n[ "$HOROVOD_RANK" = 1 ] && export {other}\nexec {shlex.join(TRAIN)} "$@"\n'
    )
    rank.chmod(0o755)
    flags = [*FLAGS_OF["powersgd"], "--exchange.start_step", "2", "--train.duration", "6"]
    where = ["--run.root", str(tmp_path / "runs"), "--train.replica_check_every", "1"]
    arguments = [*TINY, "--model.width", "64", *flags, *where]
    done = start(tmp_path / "output", arguments, "gloo:2", command=[str(rank)]).wait(120)
    # MKL has only one kind of kernels on some processors.
    if done.returncode or other.startswith("ATEN"):
        assert done.returncode == 2, done
        assert done.stderr.count("the processor here differs from the processor of") == 1, done
        assert not list((tmp_path / "runs").glob("*/metrics.jsonl")), "it trained"


def test_orthonormal_columns_span_the_columns_of_any_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(50, 3, generator=generator)
    dependent, zero = whole[:, :1].repeat(1, 3), torch.zeros(7, 3)
    for matrix, found in zip(
        (whole, dependent, zero), orthonormal([whole, dependent, zero]), strict=True
    ):
        assert torch.allclose(found.t() @ found, torch.eye(3), atol=1e-5)
        assert torch.allclose(found @ (found.t() @ matrix), matrix, atol=1e-4)
