"""batch.interleave: gradients are sent earlier and are bitwise identical to sequential passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hvdtrain import comm
from hvdtrain.engine.config import MemoryConfig
from hvdtrain.engine.interleave import InterleavedBackward
from hvdtrain.engine.memory import arrange_activations
from hvdtrain.errors import CollectiveError, UserError
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.runtime.heartbeat import Heartbeat
from tests.support.runs import losses, metrics, run, train, weights

CPU = torch.device("cpu")
SHAPE = GPTConfig(layers=3, width=32, heads=2, context=16, vocab_size=64, dropout=0.1)
PASSES = 3


def _interleaved(model: nn.Module, count: int = PASSES) -> InterleavedBackward:
    return InterleavedBackward(object(), model, count, CPU, Heartbeat())


def _gpt(checkpointed: str) -> tuple[GPT, Callable[[int], Tensor]]:
    """Return the model, and the loss of a micro-batch."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    arrange_activations(MemoryConfig(checkpointed), object(), model, CPU)

    def loss(number: int) -> Tensor:
        torch.manual_seed(number)
        tokens = torch.randint(0, 64, (2, 16))
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return model, loss


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointed", ["none", "blocks"])
def test_interleaved_backward_goes_by_block_and_is_bitwise_identical(checkpointed: str) -> None:
    model, loss = _gpt(checkpointed)
    for number in range(PASSES):
        loss(number).backward()  # type: ignore[no-untyped-call]
    expected = _gradients(model)
    model.zero_grad()
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    interleaved = _interleaved(model)
    graphs = []
    for number in range(PASSES):
        with interleaved.forward(number):
            graphs.append(loss(number))
    interleaved.backward(graphs)
    pairs = zip(_gradients(model), expected, strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)
    blocks = [name.split(".")[1] for name in order if name.startswith("blocks.")]
    assert blocks == sorted(blocks, reverse=True)
    assert {order.count(name) for name in order} == {PASSES}


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Callable[[], None] | None) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fail is not None:
            ctx.fail()
        return gradient, None


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.fail: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x = _Fails.apply(x, self.fail)
        return x.sum()


def _raises() -> None:
    raise ValueError("a mistake in a backward pass")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("failing", range(PASSES))
def test_error_in_one_interleaved_pass_is_raised_without_deadlock(failing: int) -> None:
    model = _Chain()
    interleaved = _interleaved(model)

    def backward(fail: Callable[[], None] | None) -> None:
        graphs = []
        for number in range(PASSES):
            model.fail = fail if number == failing else None
            with interleaved.forward(number):
                graphs.append(model(torch.ones(2, 4)))
        interleaved.backward(graphs)

    with pytest.raises(ValueError, match="a mistake in a backward pass"):
        backward(_raises)
    with pytest.raises(CollectiveError, match=r"comm\.barrier: .*set batch\.interleave 1"):
        backward(lambda: comm.COLLECTIVES.check("barrier"))
    model.zero_grad()
    backward(None)
    assert all(parameter.grad is not None for parameter in model.parameters())


# Of 4 micro-batches per step, one rank has 4, and three ranks have 2, 1 and 1. The
# last 3 of a rank are interleaved: after the n-th forward pass of them, n graphs are open.
@pytest.mark.parametrize(
    ("launcher", "open_graphs"),
    [("", [1, 1, 2, 3]), ("gloo:3", [1, 2, 1, 1])],
)
def test_interleaved_run_is_bitwise_identical_to_plain_run(
    tmp_path: Path, launcher: str, open_graphs: list[int]
) -> None:
    flags = ["--task", "tests.support.open_graphs:OpenGraphs", "--model.layers", "3"]
    flags += ["--train.duration", "8", "--checkpoint.every", "8", "--model.dropout", "0.1"]
    plain = train(tmp_path, "plain", flags, launcher)
    interleaved = train(tmp_path, "interleaved", [*flags, "--batch.interleave", "3"], launcher)
    assert losses(interleaved) == losses(plain)
    assert weights(interleaved, 8) == weights(plain, 8)
    assert {line["open_graphs"] for line in metrics(plain)} == {1.0}
    mean = sum(open_graphs) / len(open_graphs)
    assert {line["open_graphs"] for line in metrics(interleaved)} == {mean}


def test_interleave_rejects_unsupported_models_and_options(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"batch\.interleave 3 is for models on CPUs"):
        InterleavedBackward(object(), _Chain(), PASSES, torch.device("cuda"), Heartbeat())
    with pytest.raises(UserError, match="interleaves passes at blocks, but the model has none"):
        _interleaved(nn.Linear(2, 2))
    said = {
        ("--task", "image"): "excludes BatchNorm",
        ("--compile", "true"): "excludes compile",
        ("--batch.micro_size", "auto"): "excludes batch.micro_size auto",
        ("--parallel.tensor", "2"): "parallel.tensor 2 excludes batch.interleave 2",
    }
    for flags, words in said.items():
        where = ["--run.root", str(tmp_path), "--telemetry.port", "0"]
        done = run(tmp_path / "output", [*where, *flags, "--batch.interleave", "2"])
        assert done.returncode == 2, done
        assert words in done.stderr and "Traceback" not in done.stderr, done
