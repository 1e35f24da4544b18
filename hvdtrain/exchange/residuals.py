"""What a rank owes the others: what a compression left out of its gradients (error feedback)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hvdtrain.runtime.state_part import Scope


class Residuals:
    """The local part "residual": what a rank still owes, of each bucket.

    Ranks that inherit from several owe the sum: nothing is lost when there are fewer ranks, and a
    rank that joins owes nothing. A rank that was killed takes its own with it.
    """

    name = "residual"
    scope: Scope = "local"

    def __init__(self, residuals: Sequence[Tensor]) -> None:
        self._residuals = residuals

    def tensors(self) -> dict[str, Tensor]:
        return {f"bucket.{number}": tensor for number, tensor in enumerate(self._residuals)}

    def norm(self) -> float:
        """Of all of them, the Euclidean one; another thread may ask in the middle of a step."""
        return float(sum(tensor.double().square().sum() for tensor in self._residuals)) ** 0.5

    def compared(self) -> dict[str, Tensor]:
        return {}

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        for name, own in self.tensors().items():
            own.zero_()
            for piece in pieces:
                own.add_(piece[name].to(own.device))
