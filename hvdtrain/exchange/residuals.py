"""Residuals (error feedback): what compression has omitted from a rank's gradients so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hvdtrain.errors import UserError
from hvdtrain.runtime.state_part import Scope


class Residuals:
    """The local part "residual": this rank's residual of each bucket.

    A rank that inherits from several ranks holds the sum of their residuals: nothing is lost when
    there are fewer ranks. A rank that joins starts with zero. The residual of a killed rank is
    lost.
    """

    name = "residual"
    scope: Scope = "local"

    def __init__(self, residuals: Sequence[Tensor]) -> None:
        self._residuals = residuals

    def tensors(self) -> dict[str, Tensor]:
        return {f"bucket.{number}": tensor for number, tensor in enumerate(self._residuals)}

    def norm(self) -> float:
        """Euclidean norm of all residuals; another thread may call it in the middle of a step."""
        return float(sum(tensor.double().square().sum() for tensor in self._residuals)) ** 0.5

    def compared(self) -> dict[str, Tensor]:
        return {}

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        """Raise UserError if the residuals belong to other buckets."""
        own = self.tensors()
        for piece in pieces:
            require_same_buckets(own, piece)
        for name, tensor in own.items():
            tensor.zero_()
            for piece in pieces:
                tensor.add_(piece[name].to(tensor.device))


def require_same_buckets(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Check that state saved by bucket fits the current buckets.

    Raises:
        UserError: the buckets differ.
    """
    if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in saved.items()}:
        raise UserError(
            "what the checkpoint has of exchange.compression was saved by another version of "
            "hvdtrain, or with other keys of it; use these, or another run.id"
        )
