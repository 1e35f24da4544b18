"""Stages of a model in one process: where a stage leaves the task's loss()."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.parallel.cut import CutModel
from hvdtrain.parallel.schedules import Layout
from hvdtrain.runtime.device import seed_all
from tests.support.pipelined import Codes, Pictures, Words

TASKS = {
    "tokens": Words(layers=4),
    "tied": Words(layers=4, tied_embeddings=True),
    "sums": Words(layers=4, weighted=True),
    "dict": Codes(),
    "images": Pictures(),
}


class _Cautious:
    """A task whose loss() catches all exceptions it can, and records what it did."""

    def __init__(self) -> None:
        self.inner = Words(layers=4)
        self.seen: list[str] = []

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        try:
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                found = self.inner.loss(model, batch)
            self.seen.append("after the model")
            return found
        except Exception:
            self.seen.append("except Exception")
            raise
        finally:
            self.seen.append("finally")


def _first_stage(task: Any, model: nn.Module) -> CutModel:
    return CutModel(task, model, Layout(2), 0)


@pytest.mark.parametrize("name", TASKS)
def test_stages_one_after_the_other_compute_the_loss_of_the_whole_model(name: str) -> None:
    task = TASKS[name]
    seed_all(1)
    whole, batch = task.model().eval(), task.batch(2)
    expected = task.loss(copy.deepcopy(whole), batch)
    found: Any = None
    for rank in range(3):
        cut = CutModel(task, copy.deepcopy(whole), Layout(3), rank)
        found = cut.run(rank, found, None, lambda cut=cut: task.loss(cut.model, batch))
        assert isinstance(found, Tensor) == (rank < 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_stage_leaves_a_loss_that_catches_exceptions() -> None:
    task = _Cautious()
    batch = task.inner.batch(2)
    cut = _first_stage(task, task.inner.model())
    x = cut.run(0, None, None, lambda: task.loss(cut.model, batch))
    assert isinstance(x, Tensor) and x.shape == (2, 8, 16)
    assert task.seen == ["finally"]
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_stage_leaves_after_the_hooks_that_the_model_has() -> None:
    task = Words(layers=4)
    cut = _first_stage(task, task.model())
    seen: list[Tensor] = []
    cut.model.register_forward_hook(lambda model, args, output: seen.append(output))
    cut.leave_after_hooks()
    x = cut.run(0, None, None, lambda: task.loss(cut.model, task.batch(2)))
    assert len(seen) == 1 and seen[0] is x


def test_error_of_a_task_is_not_taken_for_the_end_of_a_stage() -> None:
    task = Words(layers=4)
    cut = _first_stage(task, task.model())

    def fail() -> Any:
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        cut.run(0, None, None, fail)
