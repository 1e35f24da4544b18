"""What a rank owes the others: what a compression left out of its gradients (error feedback)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hvdtrain.errors import UserError
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
        """Raises UserError where they are of other buckets."""
        own = self.tensors()
        for piece in pieces:
            require_same_buckets(own, piece)
        for name, tensor in own.items():
            tensor.zero_()
            for piece in pieces:
                tensor.add_(piece[name].to(tensor.device))


def require_same_buckets(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """What is saved by bucket can be taken over where the buckets are those of now.

    Raises:
        UserError: they are others.
    """
    if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in saved.items()}:
        raise UserError(
            "what the checkpoint has of exchange.compression was saved by another version of "
            "hvdtrain, or with other keys of it; use these, or another run.id"
        )
