"""Gradients sent in 16 bits: nearly the same losses with half of the bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hvdtrain.exchange.wire import Float16
from tests.support.runs import TINY, losses, run, train, weights

STEPS, HALF = 60, 30
FLAGS = ["--train.duration", str(STEPS), "--checkpoint.every", str(HALF)]
# The files of a checkpoint, one of which is the scale of float16.
PARTS = {"float16": {"wire.safetensors"}, "bfloat16": set()}


@pytest.mark.parametrize(("wire", "launcher"), [("float16", "mpirun:2"), ("bfloat16", "gloo:2")])
def test_16_bit_wire_halves_bytes_keeps_the_curve_and_resumes_exactly(
    tmp_path: Path, wire: str, launcher: str
) -> None:
    dense = train(tmp_path, "dense", FLAGS, launcher)
    flags, files = [*FLAGS, "--exchange.wire", wire], 2 + len(PARTS[wire])
    halved = train(tmp_path, "halved", flags, launcher)
    assert losses(halved) == pytest.approx(losses(dense), rel=0.01)
    assert losses(halved) != losses(dense)
    assert 2 * _bytes(halved) == _bytes(dense) > 0
    checkpoint = halved / f"checkpoints/step_{HALF:08}"
    assert {path.name for path in checkpoint.glob("*.safetensors")} >= PARTS[wire]
    resumed = train(tmp_path, "resumed", [*flags, "--run.resume", str(checkpoint)], launcher)
    assert losses(resumed) == losses(halved)[HALF:]
    assert weights(resumed, STEPS, files) == weights(halved, STEPS, files)


def _bytes(directory: Path) -> int:
    """Return the bytes of gradients that rank 0 has exchanged in all steps."""
    lines = [json.loads(line) for line in (directory / "ranks.jsonl").read_text().splitlines()]
    return sum(line["bytes"][0] for line in lines)


def test_wire_scale_shrinks_after_an_overflow_and_grows_again() -> None:
    wire = Float16()
    first = wire.tensors()["scale"].item()
    wire.commit(applied=False)
    assert wire.tensors()["scale"].item() == first / 4
    for _ in range(1000):
        wire.commit(applied=True)
    assert wire.tensors()["scale"].item() == first
    other = Float16()
    other.load([{name: tensor.clone() for name, tensor in wire.tensors().items()}])
    assert other.tensors() == wire.tensors()
    compressed, context = wire.compress(torch.tensor([1e-6, -3.0]))
    assert compressed.dtype == torch.float16
    torch.testing.assert_close(
        wire.decompress(compressed, context), torch.tensor([1e-6, -3.0]), rtol=1e-3, atol=0
    )


def test_exact_exchange_refuses_a_float16_wire(tmp_path: Path) -> None:
    flags = ["--exchange.name", "exact", "--runtime.threads", "1", "--exchange.wire", "float16"]
    done = run(tmp_path, [*TINY, *flags])
    assert done.returncode == 2, done
    assert "exchange.wire float16 excludes exchange.name exact" in done.stderr, done
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, done
