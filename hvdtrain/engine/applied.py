"""Count the steps that a state has been through, independently of the run's progress."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class AppliedSteps:
    """Steps that the tensors of this rank have been through, counted where they change.

    The count is sent with the tensors and `Progress.step` with the progress: if they differ, a step
    was applied twice or left out.

    Args:
        optimizer: steps on the tensors.

    Attributes:
        count: steps, including skipped ones.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.count = 0
        optimizer.register_step_post_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1

    def skip(self) -> None:
        """Count a step that changes no tensor: its gradient was not finite."""
        self.count += 1

    def check(self, step: int) -> None:
        """Raise RuntimeError unless the tensors have been through `step` steps."""
        if self.count != step:
            raise RuntimeError(
                f"the run is at step {step}, but {self.count} steps were applied to the parameters "
                "of this rank: a step was applied twice or left out"
            )
