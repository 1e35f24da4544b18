"""`hvdtrain ckpt`: list, verify and export the checkpoints of a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hvdtrain import cli
from hvdtrain.checkpoint.format import read
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from tests.support.runs import train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    flags = ["--train.duration", "4", "--checkpoint.every", "2"]
    return train(tmp_path_factory.mktemp("runs"), "whole", flags)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def _ckpt(*arguments: object) -> int:
    return cli.main(["ckpt", *map(str, arguments)])


def _damage(checkpoint: Path) -> None:
    path = checkpoint / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_list_shows_the_state_of_every_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run / "checkpoints"
    for name in ("left_step_00000003", ".step_00000006.host.7.abc.tmp", "step_00000005"):
        shutil.copytree(checkpoints / "step_00000004", checkpoints / name)
    (checkpoints / "step_00000005/complete").unlink()
    (checkpoints / "step_00000002/state.json").write_text("{}")
    assert _ckpt("list", run) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "MiB", "written", "state"]
    states = {line.split()[0]: " ".join(line.split()[4:]) for line in lines}
    assert list(states) == [
        "step_00000002",
        "left_step_00000003",
        "step_00000004",
        "step_00000005",
        ".step_00000006.host.7.abc.tmp",
    ]
    first, left, fourth, fifth, hidden = states.values()
    assert first.startswith("damaged: state.json has 2 bytes instead of")
    assert left == "superseded: the run resumed from before it"
    # It has its final name, so it once had its marker.
    assert (fourth, fifth) == ("finished", "damaged: it has no marker (the file 'complete')")
    assert hidden == "being written, or a leftover of a failed write"


def test_verify_detects_flipped_bits_and_missing_markers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ckpt("verify", run) == 0
    assert capsys.readouterr().out.count(": intact, ") == 2
    _damage(run / "checkpoints/step_00000002")
    assert _ckpt("verify", run) == 2
    said = capsys.readouterr()
    assert "step_00000002: optimizer.safetensors was altered" in said.err
    assert "step_00000004: intact" in said.out
    (run / "checkpoints/step_00000004/complete").rename(tmp_path / "complete")
    assert _ckpt("verify", run) == 2
    assert "step_00000004: it has no marker (the file 'complete')" in capsys.readouterr().err
    (tmp_path / "complete").rename(run / "checkpoints/step_00000004/complete")
    assert _ckpt("verify", run / "checkpoints/step_00000004") == 0
    assert _ckpt("verify", run / "checkpoints/step_00000002") == 2


def test_exported_weights_and_config_are_self_contained(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "somewhere/model"
    assert _ckpt("export", run, "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((out / "config.json").read_text())
    assert (config["task"], config["step"], config["samples"]) == ("language_model", 4, 32)
    assert "optim" not in config
    model = GPT(GPTConfig(**config["model"]))  # also contains the vocabulary size
    weights = load_file(out / "model.safetensors")
    model.load_state_dict(weights)
    saved = read(run / "checkpoints/step_00000004").parts["model"]
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
    earlier = run / "checkpoints/step_00000002"
    assert _ckpt("export", earlier, "--out", tmp_path / "earlier") == 0
    assert json.loads((tmp_path / "earlier/config.json").read_text())["step"] == 2


def test_export_refuses_existing_targets_and_damaged_checkpoints(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    assert _ckpt("export", run, "--out", kept) == 2
    assert "exists already" in capsys.readouterr().err and not list(kept.iterdir())
    _damage(run / "checkpoints/step_00000004")
    before = set(tmp_path.iterdir())
    assert _ckpt("export", run, "--out", tmp_path / "out") == 2
    assert "was altered" in capsys.readouterr().err
    below = run / "config.yaml/out"
    assert _ckpt("export", run / "checkpoints/step_00000002", "--out", below) == 2
    assert set(tmp_path.iterdir()) == before  # no incomplete file is left


@pytest.mark.parametrize("action", ["list", "verify", "export"])
def test_path_that_is_not_a_run_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    more = ["--out", tmp_path / "out"] if action == "export" else []
    for path in (tmp_path, tmp_path / "none", tmp_path / "step_00000001"):
        assert _ckpt(action, path, *more) == 2
        assert str(path) in capsys.readouterr().err


def test_ckpt_does_not_import_torch(run: Path) -> None:
    code = (
        "import sys; from hvdtrain.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    for arguments in (["list", run], ["verify", run], ["export", run, "--out", run / "out"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "ckpt", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
