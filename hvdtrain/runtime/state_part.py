"""Parts of a run's state: what a part of any kind, and a part held in shards, can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from hvdtrain.runtime.tensor_shards import ShardPosition

Scope = Literal["replicated", "sharded", "local"]


class StatePart(Protocol):
    """A named part of the state, which is saved, broadcast, compared and loaded.

    Attributes:
        name: name of its file in a checkpoint, without rank or extension.
        scope: "replicated": every rank holds the same tensors. Rank 0 saves them, and a rank that
            joins receives them from another rank. "local": each rank holds its own tensors and
            saves them. Ranks that continue keep them, and a rank that joins starts without them.
            "sharded": the ranks together hold all tensors, see ShardedPart.
    """

    name: str
    scope: Scope

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors (not copies) by name; there may be none yet."""
        ...

    def compared(self) -> dict[str, Tensor]:
        """Return tensors that are bitwise identical on all intact ranks; none if local."""
        ...

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Load results of `tensors`, from an earlier time or another rank.

        Args:
            saved: if replicated: one item. If local: items of the ranks from which this rank
                inherits: none, only its own, or several. No item: reset to the start of a run.

        Raises:
            UserError: the tensors do not fit.
        """


class Saved(NamedTuple):
    """A tensor that a rank saves of a sharded part.

    Args:
        position: in the whole tensor; None: the tensor is whole.
    """

    tensor: Tensor
    position: ShardPosition | None


class ShardedPart(ABC):
    """A StatePart that ranks hold in shards; one holder of each shard saves it.

    Any number of ranks, in any layout, can read what was saved. Ranks that continue redistribute
    the shards (parallel/shards.py).
    """

    name: str
    scope: Scope = "sharded"

    @abstractmethod
    def saved(self) -> dict[str, Saved]:
        """Return the live tensors that this rank saves; all ranks together save each element."""

    @abstractmethod
    def compared(self) -> dict[str, Tensor]:
        """See StatePart: identical on all intact ranks that hold the same shard."""

    @abstractmethod
    def read(self, directory: Path, step: int) -> None:
        """Load this rank's shards from a checkpoint, whichever ranks saved them.

        Args:
            step: the step after which it was saved.

        Raises:
            UserError: the checkpoint does not fit, or is damaged.
        """

    @abstractmethod
    def reset(self) -> None:
        """Reset the state to the start of a run."""

    def tensors(self) -> dict[str, Tensor]:
        """See StatePart: the tensors that this rank saves."""
        return {name: saved.tensor for name, saved in self.saved().items()}

    def positions(self) -> dict[str, ShardPosition]:
        """Return the position of each of `tensors` that is not whole."""
        return {name: s.position for name, s in self.saved().items() if s.position is not None}

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """See StatePart; a sharded part can only be reset, because `read` loads files."""
        assert not saved
        self.reset()
