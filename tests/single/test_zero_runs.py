"""parallel.shard.stage 1: the same losses and state for any shard placement, and after a resume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hvdtrain.checkpoint.format import read
from hvdtrain.checkpoint.spread import open_part
from tests.support import runs

STEPS, SAVED = 6, 3
# Sums do not depend on the number of ranks, so runs are bitwise identical.
EXACT = [
    *("--exchange.name", "exact", "--runtime.threads", "1", "--train.duration", str(STEPS)),
    *("--checkpoint.every", str(SAVED), "--checkpoint.keep", "9", "--optim.clip_norm", "0.1"),
]


def _zero(copies: int) -> list[str]:
    return ["--parallel.shard.stage", "1", "--parallel.shard.copies", str(copies)]


def _state(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    """Return the assembled content of a checkpoint."""
    directory = run / f"checkpoints/step_{step:08}"
    optimizer = open_part(directory, "optimizer")
    assert optimizer is not None
    state = {name: optimizer.whole(name) for name in optimizer.names()}
    return state | read(directory).parts["model"]


def _assert_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process with the whole optimizer."""
    return runs.train(tmp_path_factory.mktemp("whole"), "whole", EXACT)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks that hold two thirds each."""
    return runs.train(
        tmp_path_factory.mktemp("three"), "three", [*EXACT, *_zero(2)], "gloo:3", timeout=240
    )


def test_three_sharded_ranks_are_bitwise_identical_to_one_rank(whole: Path, three: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.cli", "audit", "--same", str(three), str(whole)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "optimizer state after 2 of them" in done.stdout, done
    assert done.returncode == 0, done
    files = sorted((three / f"checkpoints/step_{STEPS:08}").glob("optimizer.*"))
    assert [f.name for f in files] == [f"optimizer.rank_{r:05}.safetensors" for r in range(3)]
    for step in (SAVED, STEPS):
        _assert_bits(_state(three, step), _state(whole, step))


@pytest.mark.parametrize(
    ("first", "launcher", "zero"),
    [
        ("three", "", []),
        ("three", "gloo:2", _zero(1)),
        ("three", "gloo:4", _zero(3)),
        ("whole", "mpirun:2", _zero(1)),
    ],
)
def test_checkpoint_resumes_bitwise_on_other_world_sizes_and_shardings(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    whole: Path,
    first: str,
    launcher: str,
    zero: list[str],
) -> None:
    checkpoint = request.getfixturevalue(first) / f"checkpoints/step_{SAVED:08}"
    flags = [*EXACT, *zero, "--run.resume", str(checkpoint)]
    resumed = runs.train(tmp_path, "resumed", flags, launcher, timeout=240)
    assert runs.losses(resumed) == runs.losses(whole)[SAVED:]
    _assert_bits(_state(resumed), _state(whole))


def test_sharded_bf16_master_weights_are_bitwise_identical_to_one_rank(tmp_path: Path) -> None:
    flags = [*EXACT, "--precision.name", "bf16-params"]
    alone = runs.train(tmp_path, "alone", flags)
    parts = runs.train(tmp_path, "parts", [*flags, *_zero(1)], "mpirun:2", timeout=240)
    assert runs.losses(parts) == runs.losses(alone)
    _assert_bits(_state(parts), _state(alone))
    assert any(name.endswith("/master") for name in _state(parts))
