"""`hvdtrain generate`: text from a run's newest checkpoint, without the run's data."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain import cli
from hvdtrain.checkpoint.format import read
from hvdtrain.data.config import DataConfig
from hvdtrain.data.token_files import TokenMeta
from hvdtrain.errors import UserError
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.sampling import Sampling, continue_tokens
from hvdtrain.tasks.language_model import LanguageModel, LanguageModelConfig
from tests.support.runs import run, train

PROMPT = "the quick "


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 50 and 100, whose data is gone."""
    root = tmp_path_factory.mktemp("runs")
    text = root / "text"
    text.write_text("the quick brown fox jumps over the lazy dog, and it yawns. " * 300)
    flags = ["--train.duration", "100", "--checkpoint.every", "50", "--data.train", str(text)]
    directory = train(root, "whole", flags)
    text.unlink()
    return directory


def _written(capsys: pytest.CaptureFixture[str], directory: Path, *flags: object) -> str:
    words = ["generate", directory, "--prompt", PROMPT, "--length", 40, *flags]
    assert cli.main([str(word) for word in words]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def _likeliest(directory: Path, step: int) -> str:
    """Return the text of a checkpoint's model without random draws."""
    config = GPTConfig(layers=1, heads=2, width=32, context=32, vocab_size=256)
    model = GPT(config).eval()
    model.load_state_dict(read(directory / f"checkpoints/step_{step:08}").parts["model"])
    tokens = list(PROMPT.encode())
    for _ in range(40):
        tokens.append(int(model(torch.tensor([tokens[-32:]]))[0, -1].argmax()))
    return bytes(tokens).decode(errors="replace")


def test_generate_uses_newest_complete_checkpoint(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(whole, tmp_path / "run"))
    assert _likeliest(directory, 100) != _likeliest(directory, 50)
    assert _written(capsys, directory, "--temperature", 0) == _likeliest(directory, 100)
    (directory / "checkpoints/step_00000100/model.safetensors").write_bytes(b"")
    assert _written(capsys, directory, "--temperature", 0) == _likeliest(directory, 50)


def test_seed_and_temperature_determine_text(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [_written(capsys, whole, "--seed", seed) for seed in (1, 1, 2)]
    assert all(text.startswith(PROMPT) and len(text) > len(PROMPT) for text in texts)
    assert texts[0] == texts[1] != texts[2]
    cold = [_written(capsys, whole, "--seed", seed, "--temperature", 1e-4) for seed in (1, 2)]
    assert cold[0] == cold[1] == _written(capsys, whole, "--temperature", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("", "the prompt is empty"),
        ("rm -r checkpoints/*", "has no checkpoint yet"),
        ("rm config.yaml", "is not a run directory: it has no config.yaml"),
        (
            "sed -i 's/layers: 1/layers: 2/' config.yaml",
            "the weights do not match this configuration",
        ),
    ],
)
def test_generate_reports_user_error_in_one_line(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    directory = Path(shutil.copytree(whole, tmp_path / "run"))
    subprocess.run(["sh", "-c", change], cwd=directory, check=True)
    assert cli.main(["generate", str(directory), "--prompt", "a" if change else ""]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hvdtrain: error: ") and message in line


def test_generate_rejects_run_of_non_language_model_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ["--task", "tests.support.tasks:Regression", "--telemetry.port", "0"]
    where = ["--run.root", str(tmp_path), "--run.id", "a", "--train.duration", "1"]
    assert run(tmp_path, [*task, *where]).returncode == 0
    assert cli.main(["generate", str(tmp_path / "a"), "--prompt", "a"]) == 2
    assert "has the task tests.support.tasks:Regression; text" in capsys.readouterr().err


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_generation_ignores_tokens_before_last_separator(positions: Any) -> None:
    torch.manual_seed(0)
    sizes = GPTConfig(2, 2, width=32, context=8, vocab_size=50, positions=positions)
    model = GPT(replace(sizes, tied_embeddings=False)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    sampling = Sampling(length=9)
    # Token 7 separates documents: one begins in the prompt, others may be drawn.
    with_another = continue_tokens(model, [1, 7, 2, 7, 3], 50, sampling, separator=7)[3:]
    assert with_another == continue_tokens(model, [7, 3], 50, sampling, separator=7)
    assert with_another != continue_tokens(model, [1, 7, 2, 7, 3], 50, sampling)[3:]
    always = Sampling(length=20, temperature=10.0)
    drawn = continue_tokens(model, [1], 3, always, separator=2)
    again = [1]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        begin = max((i for i, token in enumerate(again) if token == 2), default=0)
        logits = model(torch.tensor([again[begin:][-8:]]))[0, -1, :3] / 10
        again.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    assert drawn == again and again.count(2) > 2


@pytest.mark.parametrize(("tokenizer", "message"), [("bytes", ""), ("my.json", "--tokenizer")])
def test_generate_decodes_with_tokenizer_of_token_files(
    tmp_path: Path, tokenizer: str, message: str
) -> None:
    TokenMeta(256, tokenizer).write(tmp_path)
    (tmp_path / "train.u16").write_bytes(bytes(100))
    sizes = GPTConfig(layers=1, heads=2, width=32, context=32)
    data = DataConfig(source="tokens", train=[str(tmp_path / "train.u16")])
    task = LanguageModel(LanguageModelConfig(sizes, data))
    weights = GPT(replace(sizes, vocab_size=256)).state_dict()
    with pytest.raises(UserError, match=message) if message else nullcontext():
        model = task.trained_model(weights).eval()
        assert len(task.generate(model, "ab", Sampling(length=5, temperature=0.0))) > 2
