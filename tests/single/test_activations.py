"""Activation checkpointing saves memory with bitwise identical results; out-of-memory errors."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from hvdtrain.config import parse
from hvdtrain.engine.config import MemoryConfig
from hvdtrain.engine.memory import arrange_activations
from hvdtrain.errors import UserError
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from tests.support.runs import losses, run

CPU = torch.device("cpu")
SHAPE = GPTConfig(layers=4, width=64, heads=4, context=64, vocab_size=64, dropout=0.1)


class Passes(NamedTuple):
    """Results of a forward and a backward pass, and their peak memory in bytes."""

    loss: Tensor
    gradients: list[Tensor]
    peak: int


def _passes(mode: str) -> Passes:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    tokens = torch.randint(0, 64, (4, 64))
    arrange_activations(MemoryConfig(mode), object(), model, CPU)

    def once() -> Tensor:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    loss = once()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        once()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return Passes(loss, gradients, peak)


def test_recomputation_saves_memory_with_bitwise_identical_gradients() -> None:
    plain = _passes("none")
    shares = {"blocks": 0.5, "every:2": 0.75, "selective": 0.85}
    for mode, share in shares.items():
        found = _passes(mode)
        assert torch.equal(found.loss, plain.loss)
        pairs = zip(found.gradients, plain.gradients, strict=True)
        assert all(torch.equal(own, other) for own, other in pairs), mode
        assert found.peak < share * plain.peak, (mode, found.peak, plain.peak)


def test_recomputation_updates_batchnorm_statistics_once(tmp_path: Path) -> None:
    flags = [
        *("--task", "image", "--image.mixup", "0.2", "--train.duration", "3"),
        *("--eval.batches", "1", "--telemetry.port", "0", "--run.root", str(tmp_path)),
    ]
    modes = ("none", "blocks")
    for mode in modes:
        memory = ["--run.id", mode, "--memory.checkpoint_activations", mode]
        done = run(tmp_path / "output", [*flags, *memory])
        assert done.returncode == 0, done
    plain, again = (tmp_path / mode for mode in modes)
    assert losses(again) == losses(plain)
    weights = [
        directory / "checkpoints/step_00000003/model.safetensors" for directory in (plain, again)
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("value", ["all", "every", "every:0", "every:x"])
def test_unknown_activation_checkpointing_mode_is_rejected(value: str) -> None:
    with pytest.raises(UserError, match=r"must be none, blocks, every:N .* not " + value):
        parse(["--memory.checkpoint_activations", value])


def test_memory_options_unsupported_by_model_or_device_are_rejected() -> None:
    with pytest.raises(UserError, match=r"the model has no blocks .* no blocks\(model\)"):
        arrange_activations(MemoryConfig("blocks"), object(), nn.Linear(2, 2), CPU)
    with pytest.raises(UserError, match="are already in host memory"):
        arrange_activations(MemoryConfig(offload_activations=True), object(), GPT(SHAPE), CPU)


def test_out_of_memory_error_suggests_remedies_without_traceback(tmp_path: Path) -> None:
    flags = ["--task", "tests.support.tasks:Large", "--run.root", str(tmp_path)]
    done = run(tmp_path / "output", [*flags, "--telemetry.port", "0"])
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    message = done.stderr.strip().splitlines()[-1]
    assert "memory is not enough: this process has " in message, done
    assert "Try, in this order: memory.checkpoint_activations blocks" in message, done
