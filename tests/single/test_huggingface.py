"""Exports to transformers, which reproduces the logits of the trained model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.checkpoint.format import read
from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.huggingface import to_huggingface
from tests.support.runs import run, train

LLAMA = ["--model.norm", "rms", "--model.mlp", "swiglu", "--model.mlp_width", "48"]
EXPORT = [sys.executable, "-m", "hvdtrain.cli", "ckpt", "export"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.positions", "learned"],
        ["--model.positions", "rotary", "--model.tied_embeddings", "false"],
        [*LLAMA, "--model.kv_heads", "1", "--model.bias", "false", "--model.rotary_base", "500"],
        [*LLAMA, "--model.tied_embeddings", "false", "--model.norm_eps", "0.01"],
    ],
    ids=["learned", "rotary-untied", "llama-grouped", "llama-untied-biases"],
)
def test_transformers_reproduces_logits_of_exported_model(tmp_path: Path, flags: list[str]) -> None:
    import transformers  # takes seconds

    directory = train(tmp_path, "case", ["--train.duration", "3", "--optim.lr", "0.05", *flags])
    out = tmp_path / "exported"
    done = subprocess.run(
        [*EXPORT, str(directory), "--out", str(out), "--format", "huggingface"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done
    settings = parse(["--config", str(directory / "config.yaml")])
    checkpoint = read(directory / "checkpoints/step_00000003")
    ours = settings.task_class(settings.task_config).trained_model(checkpoint.parts["model"]).eval()
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    tokens = torch.randint(256, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, logits = ours(tokens), theirs.eval()(tokens).logits
    assert expected.std() > 0.05, "the logits are too similar to differ"
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "other",
    [{"norm": "rms"}, {"kv_heads": 1}, {"bias": False}, {"positions": "learned", "mlp": "swiglu"}],
)
def test_export_rejects_architecture_unknown_to_transformers(other: dict[str, Any]) -> None:
    config = GPTConfig(layers=1, heads=2, width=8, vocab_size=5, **other)
    with pytest.raises(UserError, match="but no model with positions"):
        to_huggingface(config, GPT(config).state_dict())


def test_export_rejects_task_without_transformers_model(tmp_path: Path) -> None:
    flags = ["--task", "tests.support.tasks:Regression", "--run.root", str(tmp_path)]
    done = run(tmp_path / "output", [*flags, "--run.id", "case", "--telemetry.port", "0"])
    assert done.returncode == 0, done
    command = [*EXPORT, str(tmp_path / "case"), "--out", str(tmp_path / "out")]
    exported = subprocess.run(
        [*command, "--format", "huggingface"], capture_output=True, text=True, timeout=120
    )
    assert exported.returncode == 2, exported
    assert "is of the task tests.support.tasks:Regression" in exported.stderr
    assert not (tmp_path / "out").exists()
