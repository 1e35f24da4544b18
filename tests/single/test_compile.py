"""compile: same curve, same tensor names, and a one-line error if unavailable."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from hvdtrain.checkpoint.format import read
from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.tasks import blocks_of
from tests.support.runs import TINY, losses, run, train

STEPS = 3
FLAGS = ["--train.duration", str(STEPS)]


@pytest.mark.soak
@pytest.mark.slow
def test_compiled_model_keeps_the_curve_and_tensor_names(tmp_path: Path) -> None:
    plain = train(tmp_path, "plain", FLAGS)
    where = ["--run.root", str(tmp_path), "--run.id", "compiled", "--compile", "true"]
    done = run(tmp_path / "output", [*TINY, *FLAGS, *where], timeout=240)
    assert done.returncode == 0, done
    assert "compiled a block of the model: " in done.stderr, done
    compiled = tmp_path / "compiled"
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    one, other = (read(f / f"checkpoints/step_{STEPS:08}") for f in (compiled, plain))
    for part, tensors in one.parts.items():
        assert tensors.keys() == other.parts[part].keys()


def test_missing_compiler_is_reported_without_traceback(tmp_path: Path) -> None:
    flags = [*TINY, "--run.root", str(tmp_path), "--compile", "true"]
    done = run(tmp_path / "output", flags, env={"PATH": str(tmp_path)})
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    message = done.stderr.strip().splitlines()[-1]
    assert "torch.compile does not work on this host (no g++ on PATH)" in message, done


def test_compile_rejects_exact_exchange() -> None:
    flags = "--exchange.name exact --runtime.threads 1 --compile true"
    with pytest.raises(UserError, match=r"compile excludes exchange\.name exact"):
        parse(flags.split())


class _Task:
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model.small[1]]  # type: ignore[union-attr, index, list-item]


class _Foreign:
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [nn.Tanh()]


def _model() -> nn.Module:
    model = nn.Module()
    model.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    model.large = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
    return model


def test_blocks_come_from_the_task_or_the_largest_module_list() -> None:
    model = _model()
    assert blocks_of(object(), model) == list(model.large)  # type: ignore[arg-type]
    assert blocks_of(_Task(), model) == [model.small[1]]  # type: ignore[union-attr, index]
    assert blocks_of(object(), nn.Linear(2, 2)) == []
    with pytest.raises(UserError, match=r"blocks\(model\) has a Tanh that is not a module"):
        blocks_of(_Foreign(), model)
