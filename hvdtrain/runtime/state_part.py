"""What the state of a run is made of, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

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
