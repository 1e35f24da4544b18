"""The check before an exact run on GPUs that a gradient is the same each time, here on CPUs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hvdtrain.errors import EXIT_USER, UserError
from hvdtrain.optim.precision import FLOAT32
from hvdtrain.process.repeatable import FirstMicroBatch, check_repeatable
from hvdtrain.tasks import Task
from tests.support.job import Finished
from tests.support.runs import losses, run
from tests.support.undetermined import CheckedOnCpus, Jittering, WithoutKernel

FLAGS = [
    *("--exchange.name", "exact", "--runtime.threads", "1", "--telemetry.port", "0"),
    *("--batch.global_size", "8", "--batch.micro_size", "4", "--eval.every", "0"),
    *("--train.duration", "6", "--run.id", "run"),
]


@pytest.fixture(autouse=True)
def warnings_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("hvdtrain.process.repeatable.CHECKED", ("cpu",))
    yield
    torch.use_deterministic_algorithms(False)


def _first(task: Task) -> FirstMicroBatch:
    return FirstMicroBatch(task, task.model(), task.datasets(), FLOAT32, range(4), seed=1)


def test_same_micro_batch_with_dropout_has_the_same_gradient() -> None:
    assert _first(CheckedOnCpus()).differing() == []


def test_parameters_with_other_gradients_each_time_are_named() -> None:
    assert _first(Jittering()).differing() == ["0.weight", "0.bias"]


@pytest.mark.parametrize("task", [CheckedOnCpus, Jittering])
def test_check_leaves_buffers_gradients_and_random_numbers(task: type[CheckedOnCpus]) -> None:
    first = _first(task())

    def state() -> list[Any]:
        tensors = [t.clone() for t in first.model.state_dict().values()]
        gradients = [p.grad for p in first.model.parameters()]
        numbers = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
        return [*tensors, *numbers, *gradients]

    before = state()
    first.differing()
    for one, other in zip(before, state(), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def _check(task: Task) -> None:
    check_repeatable(task, task.model(), task.datasets(), FLOAT32, 1, 4, None)


def test_operation_without_a_deterministic_kernel_is_named() -> None:
    with pytest.raises(UserError, match="put_ has no deterministic kernel on this device"):
        _check(WithoutKernel())


def test_other_errors_of_the_loss_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> dict[str, Tensor]:
        raise RuntimeError("of the task")

    monkeypatch.setattr(CheckedOnCpus, "loss", fails)
    with pytest.raises(RuntimeError, match="of the task"):
        _check(CheckedOnCpus())


def _run(root: Path, task: str, *flags: str, env: dict[str, str] | None = None) -> Finished:
    where = ["--task", f"tests.support.undetermined:{task}", "--run.root", str(root)]
    return run(root / "output", [*FLAGS, *where, *flags], "gloo:2", env)


# With one micro-batch per step, rank 1 has none.
@pytest.mark.parametrize("size", ["8", "4"])
def test_run_with_other_gradients_each_time_ends_before_its_first_step(
    tmp_path: Path, size: str
) -> None:
    done = _run(tmp_path, "Jittering", "--batch.global_size", size)
    assert done.returncode == EXIT_USER and "Traceback" not in done.stderr, done
    assert done.stderr.count("differs at 2 of 6 parameters, such as 0.weight") == 1, done
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_check_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    found = []
    for task in ("CheckedOnCpus", "NotChecked"):
        done = _run(tmp_path / task, task)
        assert done.returncode == 0, done
        found.append(losses(tmp_path / task / "run"))
    assert found[0] == found[1]


# The error is found before the first step, in it, and in the second step's only micro-batch.
@pytest.mark.parametrize(
    ("checked", "calls", "size"), [("1", "0", "8"), ("0", "0", "8"), ("0", "1", "4")]
)
def test_all_ranks_end_alike_without_a_deterministic_kernel(
    tmp_path: Path, checked: str, calls: str, size: str
) -> None:
    env = {"HVDTRAIN_TEST_CHECKED": checked, "HVDTRAIN_TEST_CALLS": calls}
    done = _run(tmp_path, "WithoutKernel", "--batch.global_size", size, env=env)
    assert done.returncode == EXIT_USER and "Traceback" not in done.stderr, done
    assert done.stderr.count("put_ has no deterministic kernel") == 1, done
