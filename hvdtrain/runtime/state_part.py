"""What the state of a run is made of, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from hvdtrain.runtime.pieces import Piece

Scope = Literal["replicated", "sharded", "local"]


class StatePart(Protocol):
    """A named part of the state: what is saved, broadcast, compared and taken over.

    Attributes:
        name: of its file in a checkpoint, without rank or ending.
        scope: of a "replicated" part every rank holds the same tensors: rank 0 saves them, and a
            rank that joins gets them from another one. Of a "local" part each rank holds its own:
            each saves them, those who train on keep them, and a rank that joins begins without. Of
            a "sharded" part the ranks together hold all, in pieces: each saves some, and whatever
            ranks there are then deal them anew.
    """

    name: str
    scope: Scope

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors (not copies) by name; none may be there yet."""
        ...

    def compared(self) -> dict[str, Tensor]:
        """Those that have the same bits on all ranks unless one was damaged; none if local."""
        ...

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        """Takes over what `tensors` gave, once or elsewhere.

        Args:
            pieces: one, if replicated; none: all is to be as at the start of a run. If local:
                those of the ranks from which this rank inherits, which may be none, its own
                alone, or several.

        Raises:
            UserError: it does not fit.
        """


class ShardedPart(StatePart, Protocol):
    """A part of which each rank holds pieces: each piece is saved by one of those that hold it."""

    def pieces(self) -> dict[str, Piece]:
        """Where each of `tensors` lies in the whole one; of those that are whole none is needed."""
        ...

    def read(self, folder: Path, version: int) -> None:
        """Takes over from a checkpoint what this rank holds, whoever has saved it.

        Args:
            version: the step that it was saved after.

        Raises:
            UserError: it does not fit, or is damaged.
        """
