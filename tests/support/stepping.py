"""Steps of the engine without a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hvdtrain.data.assignment import Assignment
from hvdtrain.engine.loop import Stepper
from hvdtrain.engine.step import Flags, StepResult


def take_step(
    stepper: Stepper,
    batches: Iterator[Any],
    assignment: Assignment,
    lr: float,
    flags: Flags,
    advance: Callable[[StepResult], None] = lambda result: None,
) -> StepResult:
    """Take one step with the task's loss."""
    stepper.begin(batches, assignment, flags)
    try:
        stepper.train()
        stepper.exchange()
    except Exception:
        stepper.fail()
        raise
    return stepper.end(lr, advance)
