"""The moving average of the weights: equal to torch's own, saved, evaluated and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hvdtrain import cli
from hvdtrain.checkpoint.format import read
from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.ema import Ema
from hvdtrain.optim.optimizer import build_optimizer
from tests.support.runs import metrics, train, weights


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).to(dtype)
    model[0].bias.requires_grad_(False)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
    optimizer.step()


def test_averages_match_torchs_averaged_model() -> None:
    model = _model()
    optimizer = build_optimizer(OptimConfig(lr=0.1), model)
    ema = Ema(optimizer, model, 0.9)
    plain = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    assert not ema.started and ema.tensors() == {}
    for step in range(5):
        _step(model, optimizer, step)
        plain.update_parameters(model)
    theirs = dict(plain.module.named_parameters())
    assert ema.tensors().keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for name, tensor in ema.tensors().items():
        assert torch.equal(tensor, theirs[name]), name


def test_averages_are_applied_temporarily() -> None:
    model = _model()
    optimizer = build_optimizer(OptimConfig(lr=0.1), model)
    ema = Ema(optimizer, model, 0.5)
    for step in range(3):
        _step(model, optimizer, step)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="in between"), ema.applied():
        for name, average in ema.tensors().items():
            now = model.get_parameter(name).detach()
            assert torch.equal(now, average) and not torch.equal(now, before[name])
        raise RuntimeError("in between")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), before[name]), name


def test_averages_of_half_precision_weights_are_kept_in_float32() -> None:
    model = _model(torch.bfloat16)
    optimizer = build_optimizer(OptimConfig(name="sgd", lr=1e-2), model)
    ema = Ema(optimizer, model, 0.999)
    _step(model, optimizer, 0)
    first = {name: tensor.clone() for name, tensor in ema.tensors().items()}
    _step(model, optimizer, 1)
    assert all(tensor.dtype == torch.float32 for tensor in first.values())
    assert any(not torch.equal(tensor, first[name]) for name, tensor in ema.tensors().items())


def test_foreign_averages_and_invalid_ema_options_are_rejected() -> None:
    model = _model()
    ema = Ema(build_optimizer(OptimConfig(), model), model, 0.9)
    with pytest.raises(UserError, match="averages are of other parameters"):
        ema.load([{"elsewhere": torch.ones(1)}])
    for flags in (["--optim.ema_decay", "1"], ["--optim.ema_decay", "-0.1"]):
        with pytest.raises(UserError, match=r"optim.ema_decay must lie in \[0, 1\)"):
            parse(flags)
    with pytest.raises(UserError, match=r"optim.ema_decay 0.\d+ excludes exchange.sync_every"):
        parse(["--optim.ema_decay", "0.9", "--exchange.sync_every", "4"])


FLAGS = ["--train.duration", "12", "--eval.every", "4", "--checkpoint.every", "6"]
FLAGS += ["--optim.ema_decay", "0.8"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run that trained with averages, "whole"."""
    root = tmp_path_factory.mktemp("runs")
    train(root, "whole", FLAGS)
    return root


@pytest.mark.slow
def test_resumed_run_has_identical_averages(root: Path) -> None:
    half = root / "whole/checkpoints/step_00000006"
    directory = train(root, "resumed", [*FLAGS, "--run.resume", str(half)])
    assert weights(directory, 12, files=3) == weights(root / "whole", 12, files=3)
    names = ("loss", "validation_loss", "ema_validation_loss", "state_hash")
    ours, theirs = metrics(directory), metrics(root / "whole")[6:]
    for name in names:
        assert [line.get(name) for line in ours] == [line.get(name) for line in theirs]
    assert [line["step"] for line in theirs if "ema_validation_loss" in line] == [8, 12]


@pytest.mark.slow
def test_averages_on_two_ranks_match_one_rank(root: Path) -> None:
    train(root, "two", FLAGS, "gloo:2")
    whole = _ema(root / "whole")
    for name, tensor in _ema(root / "two").items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-4)
    ours, theirs = (
        [line["ema_validation_loss"] for line in metrics(root / name) if line["step"] % 4 == 0]
        for name in ("two", "whole")
    )
    assert ours == pytest.approx(theirs, rel=1e-4) and len(ours) == 3


def _ema(directory: Path) -> dict[str, Tensor]:
    return read(directory / "checkpoints/step_00000012").parts["ema"]


@pytest.mark.slow
def test_exported_averages_match_the_evaluated_ones(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = root / "exported"
    assert cli.main(["ckpt", "export", str(root / "whole"), "--ema", "--out", str(out)]) == 0
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in _ema(root / "whole").items())
    hugging = ["ckpt", "export", str(root / "whole"), "--ema", "--format", "huggingface"]
    assert cli.main([*hugging, "--out", str(root / "theirs")]) == 0
    # Evaluated again, by a run that does not change them.
    still = ["--train.duration", "1", "--eval.every", "1", "--optim.lr", "1e-12"]
    directory = train(root, "still", [*still, "--run.init_from", str(out)])
    expected = metrics(root / "whole")[-1]["ema_validation_loss"]
    assert metrics(directory)[-1]["validation_loss"] == pytest.approx(expected, rel=1e-6)
    assert expected != metrics(root / "whole")[-1]["validation_loss"]
    assert cli.main(["ckpt", "export", str(directory), "--ema", "--out", str(root / "none")]) == 2
    assert "has no averaged weights: its run had no optim.ema_decay" in capsys.readouterr().err
