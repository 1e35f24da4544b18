"""Steps of the engine without a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hvdtrain.data.assignment import Assignment
from hvdtrain.engine.step import Flags, StepResult, TrainStep


def take_step(
    step: TrainStep,
    batches: Iterator[Any],
    assignment: Assignment,
    lr: float,
    flags: Flags,
    advance: Callable[[StepResult], None] = lambda result: None,
) -> StepResult:
    """Take one step with the task's loss."""
    step.begin(batches, assignment, flags)
    try:
        step.train()
        step.exchange()
    except Exception:
        step.fail()
        raise
    return step.end(lr, advance)
