"""Detection of scripts that change gradients where the change would be lost, or wrong."""

from __future__ import annotations

from torch import Tensor, nn

from hvdtrain.errors import UserError
from hvdtrain.exchange.base import Exchange

BETWEEN_MICRO_BATCHES = (
    "between the micro-batches of a step, where it is an incomplete sum of this rank: change "
    "gradients in the step's block after `for batch in step`, when they are those of the global "
    "batch"
)
AFTER_THE_BLOCK = (
    "after a step's block, which has used it: change gradients inside the block, after `for batch "
    "in step`"
)


class GradientWatch:
    """Notes the gradients, and finds those that were replaced, deleted or changed in place since.

    It reads no elements: torch counts the changes of each tensor.

    Args:
        exchange: of these gradients. Between the passes of a step most exchanges keep the
            gradients of this rank in memory of their own, which is then shown as `parameter.grad`:
            changes of a missing gradient could not be noticed.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._noted: list[tuple[nn.Parameter, Tensor | None, int]] = []
        self._shown: list[nn.Parameter] = []

    def note(self, partial: bool = False) -> None:
        """Note the gradients; `partial`: between the passes of a step."""
        memory = self._exchange.memory() if partial else {}
        parameters = self._exchange.parameters
        self._shown = [p for p in parameters if p.grad is None and p in memory]
        for parameter in self._shown:
            parameter.grad = memory[parameter]
        self._noted = [(p, p.grad, _version(p.grad)) for p in parameters]

    def require_unchanged(self, where: str) -> None:
        """Require the gradients of the last `note`, which are then forgotten.

        Args:
            where: that they were changed, and what to do, for the message.

        Raises:
            UserError: a gradient was changed.
        """
        changed = [
            parameter
            for parameter, gradient, version in self._noted
            if parameter.grad is not gradient or _version(gradient) != version
        ]
        if where is AFTER_THE_BLOCK:  # clearing is allowed there
            changed = [p for p in changed if p.grad is not None and bool(p.grad.any())]
        for parameter in self._shown:
            parameter.grad = None
        self._noted, self._shown = [], []
        if changed:
            name = self._exchange.trained.names[changed[0]]
            raise UserError(f"the gradient of the parameter {name} was changed {where}")


def _version(gradient: Tensor | None) -> int:
    # Private, but documented in torch's notes on autograd (in-place correctness checks).
    return 0 if gradient is None else gradient._version
