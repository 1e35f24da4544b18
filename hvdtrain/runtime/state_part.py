"""Protocols for the parts of a run's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from hvdtrain.runtime.shards import Piece

Scope = Literal["replicated", "sharded", "local"]


class StatePart(Protocol):
    """A named part of the state, which is saved, broadcast, compared and loaded.

    Attributes:
        name: name of its file in a checkpoint, without rank or extension.
        scope: "replicated": every rank holds the same tensors. Rank 0 saves them, and a rank that
            joins receives them from another rank. "local": each rank holds its own tensors and
            saves them. Ranks that continue keep them, and a rank that joins starts without them.
            "sharded": the ranks together hold all tensors, in pieces. Each rank saves some pieces,
            and the ranks of the next generation redistribute them.
    """

    name: str
    scope: Scope

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors (not copies) by name; there may be none yet."""
        ...

    def compared(self) -> dict[str, Tensor]:
        """Return tensors that are bitwise identical on all intact ranks; none if local."""
        ...

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        """Load results of `tensors`, from an earlier time or another rank.

        Args:
            pieces: if replicated: one item. If local: items of the ranks from which this rank
                inherits: none, only its own, or several. No item: reset to the start of a run.

        Raises:
            UserError: the tensors do not fit.
        """


class ShardedPart(StatePart, Protocol):
    """A part of which each rank holds pieces; one holder of each piece saves it."""

    def pieces(self) -> dict[str, Piece]:
        """Return the position of each of `tensors` in its whole tensor; may omit whole tensors."""
        ...

    def read(self, folder: Path, version: int) -> None:
        """Load this rank's pieces from a checkpoint, whichever ranks saved them.

        Args:
            version: the step after which it was saved.

        Raises:
            UserError: the checkpoint does not fit, or is damaged.
        """
