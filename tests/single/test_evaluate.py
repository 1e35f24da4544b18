"""Evaluation changes neither the model nor training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain.engine.callbacks.evaluate import evaluating
from tests.support.runs import metrics, run, weights

FLAGS = (
    "--batch.global_size 8 --batch.micro_size 2 --telemetry.port 0 --train.duration 6"
    " --checkpoint.every 6 --eval.batches 2"
)


def _train(root: Path, task: str, name: str, every: int, launcher: str = "") -> Path:
    where = ["--run.root", str(root), "--run.id", name, "--task", f"tests.support.unusual:{task}"]
    done = run(root / "output", [*FLAGS.split(), *where, "--eval.every", str(every)], launcher)
    assert done.returncode == 0, done
    return root / name


@pytest.mark.parametrize("task", ["HalfAsleep", "Drawing"])
def test_evaluation_does_not_change_training(tmp_path: Path, task: str) -> None:
    often = _train(tmp_path, task, "often", every=2)
    never = _train(tmp_path, task, "never", every=0)
    assert "validation_loss" in metrics(often)[1]
    assert weights(often, 6) == weights(never, 6)


def test_validation_with_random_draws_is_independent_of_ranks(tmp_path: Path) -> None:
    # At the first step, because training is still bitwise identical there.
    found = [
        metrics(_train(tmp_path, "Drawing", name, every=1, launcher=launcher))[0]
        for name, launcher in (("one", ""), ("three", "gloo:3"))
    ]
    one, three = (line["validation_loss"] for line in found)
    assert three == pytest.approx(one, rel=1e-6)


class _Counted(nn.Linear):
    """A module that overrides `train`, like layers that merge weights for evaluation."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: list[bool] = []

    def train(self, mode: bool = True) -> _Counted:
        super().train(mode)
        self.seen.append(mode)
        return self


def test_evaluation_restores_the_mode_of_every_module() -> None:
    counted, shared = _Counted(), nn.Dropout()
    asleep = nn.Sequential(nn.BatchNorm1d(2), shared, nn.Sequential(nn.Dropout()).train())
    asleep.training = asleep[0].training = False
    model = nn.Sequential(nn.Sequential(shared), counted, asleep)
    before = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    assert counted.seen == [False, True]
    with pytest.raises(ZeroDivisionError), evaluating(model):
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == before
    model.eval()
    with evaluating(model), torch.no_grad():
        pass
    assert not any(module.training for module in model.modules())
