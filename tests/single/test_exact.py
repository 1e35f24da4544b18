"""The exact exchange: one bitwise identical model on any ranks and with any launcher."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.audit.same import compare
from hvdtrain.cli import main
from hvdtrain.exchange.exact import UNIT, exact_exchange
from hvdtrain.runtime.init import initialize
from tests.support.job import Finished
from tests.support.runs import TINY, metrics, run, train, weights

STEPS = 30
EXACT = ["--exchange.name", "exact", "--runtime.threads", "1"]
FLAGS = [
    *EXACT,
    *("--train.duration", str(STEPS), "--checkpoint.every", "10", "--model.dropout", "0.1"),
    *("--eval.every", "10", "--eval.batches", "2"),
]


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CONTROLLER", "gloo")
        patch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
        initialize()
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    train(root, "alone", FLAGS)
    return root


def _audit(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["audit", "--same", str(a), str(b)])
    return code, capsys.readouterr().out


@pytest.mark.smoke
def test_run_on_three_ranks_is_bitwise_identical(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 4 micro-batches a step: the ranks have 2, 1, 1. Four and sixteen are in tests/cluster.
    directory = train(root, "three", FLAGS, "gloo:3")
    assert weights(directory, STEPS) == weights(root / "alone", STEPS)
    compared = ("loss", "grad_norm", "state_hash", "validation_loss")
    for line, alone in zip(metrics(directory), metrics(root / "alone"), strict=True):
        assert [line.get(name) for name in compared] == [alone.get(name) for name in compared]
    code, said = _audit(directory, root / "alone", capsys)
    assert code == 0 and "bitwise identical" in said, said
    assert "30 steps up to 30" in said and "after 3 of them" in said, said


def test_run_resumed_on_other_ranks_is_bitwise_identical(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = root / "alone/checkpoints/step_00000010"
    directory = train(root, "resumed", [*FLAGS, "--run.resume", str(checkpoint)], "mpirun:2")
    assert weights(directory, STEPS) == weights(root / "alone", STEPS)
    code, said = _audit(root / "alone", directory, capsys)
    assert code == 0 and "20 steps up to 30" in said, said


def test_audit_same_names_the_first_step_that_differs(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = root / "alone/checkpoints/step_00000010"
    changed = [*FLAGS, "--run.resume", str(checkpoint), "--optim.lr", "2e-3"]
    directory = train(root, "changed", changed)
    code, said = _audit(root / "alone", directory, capsys)
    assert code == 1, said
    assert "NOT identical; the first step that differs is 11 " in said, said
    assert "  lr: " in said and "  loss: " not in said, said
    assert main(["audit", "--same", str(root / "alone"), str(directory), "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["first_step"]) == (False, 11)


def test_statistics_weights_and_skipped_steps_do_not_depend_on_ranks(tmp_path: Path) -> None:
    task = "--task tests.support.unusual:WeightedAndPoisoned --train.duration 32 --eval.every 16"
    batch = "--batch.global_size 8 --batch.micro_size 2 --telemetry.port 0"
    for name, launcher in (("alone", ""), ("three", "gloo:3")):
        where = ["--run.root", str(tmp_path), "--run.id", name]
        flags = [*where, *EXACT, *task.split(), *batch.split(), "--checkpoint.every", "32"]
        done = run(tmp_path / "output", flags, launcher)
        assert done.returncode == 0, done
    alone, three = tmp_path / "alone", tmp_path / "three"
    assert sum(line.get("skipped", False) for line in metrics(alone)) == 1
    assert weights(alone, 32) == weights(three, 32)
    assert compare(alone, three).same


MISTAKES: dict[str, tuple[list[str], str]] = {
    "threads": (EXACT[:2], "exchange.name exact requires runtime.threads"),
    "name": (["--exchange.name", "exakt"], "exchange.name"),
    "negative": (["--runtime.threads", "-1"], "runtime.threads must be >= 0"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_invalid_configuration_is_a_one_line_error(tmp_path: Path, case: str) -> None:
    flags, message = MISTAKES[case]
    done: Finished = run(tmp_path, [*TINY, *flags, "--run.root", str(tmp_path)])
    assert done.returncode == 2 and message in done.stderr, done
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, done


# Arithmetic, without a run.


def _gradients(order: list[int], scale: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Return (exact, plain) gradients of 6 micro-batches that arrive in this order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    data = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(1))

    def backward() -> None:
        for number in order:
            (scale * model(data[number]).square().mean() / 6).backward()

    backward()
    plain = [_gradient(p).clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    exchange = exact_exchange(optimizer, model, micro_batches=6)
    exchange.begin(len(order))
    backward()
    exchange.reduce()
    return [_gradient(p) for p in model.parameters()], plain


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_gradient_does_not_depend_on_micro_batch_order() -> None:
    exact, plain = _gradients([0, 1, 2, 3, 4, 5])
    shuffled, plain_shuffled = _gradients([5, 2, 0, 4, 1, 3])
    for a, b in zip(exact, shuffled, strict=True):
        assert torch.equal(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(plain, plain_shuffled, strict=True))
    for a, b in zip(exact, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=6 * UNIT)


@pytest.mark.parametrize("scale", [1e9, 1e30, float("inf"), float("nan")])
def test_gradient_that_overflows_becomes_nan(scale: float) -> None:
    exact, _ = _gradients([0, 1, 2], scale)
    assert all(gradient.isnan().all() for gradient in exact)


def test_gradient_in_channels_last_memory_format_is_correct() -> None:
    def convolution() -> nn.Conv2d:
        torch.manual_seed(0)
        return nn.Conv2d(3, 4, 3)

    data = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    usual, other = convolution(), convolution().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    usual(data).square().sum().backward()
    exchange = exact_exchange(torch.optim.SGD(other.parameters(), lr=0.1), other, 1)
    exchange.begin(1)
    other(data).square().sum().backward()
    exchange.reduce()
    for a, b in zip(usual.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(_gradient(a), _gradient(b), rtol=1e-4, atol=1e-4)
        assert _gradient(b).stride() == b.stride()
