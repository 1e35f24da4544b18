"""State of a sharded optimizer, as a part of the run's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from hvdtrain.checkpoint.spread import SpreadPart, open_part
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.optim.optimizer import parameter_names
from hvdtrain.parallel.handover import hand_over
from hvdtrain.parallel.parts import Slice, hosts_that_hold_alone
from hvdtrain.parallel.zero import Entries, ShardedOptimizer
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.pieces import Piece, ShardLostError
from hvdtrain.runtime.state_part import Scope

_SCALAR = "step"  # the entry that is identical in all slices of a parameter


class ShardedOptimizerState:
    """The sharded part "optimizer": "parameter name/entry", with the names of a whole optimizer.

    A rank saves the pieces of which it is the first holder.
    """

    name = "optimizer"
    scope: Scope = "sharded"

    def __init__(self, optimizer: ShardedOptimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        self._model = model
        self._names = [*parameter_names(optimizer, model).values()]

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{self._names[s.number]}/{entry}": tensor
            for s, entries in self._own().items()
            for entry, tensor in entries.items()
            if tensor.dim() or s.start == 0
        }

    def pieces(self) -> dict[str, Piece]:
        """Place of each of `tensors` in its whole tensor."""
        shapes = [(*p.shape,) for p in self.optimizer.parameters]
        return {
            f"{self._names[s.number]}/{entry}": Piece(shapes[s.number], s.start)
            for s, entries in self._own().items()
            for entry, tensor in entries.items()
            if tensor.dim()
        }

    def _own(self) -> dict[Slice, Entries]:
        entries = self.optimizer.entries()
        return {s: entries[s] for s in self.optimizer.own_slices()}

    def compared(self) -> dict[str, Tensor]:
        return {}

    def held(self) -> dict[int, dict[str, Tensor]]:
        """This rank's state of each shard, by the shard's number; identical on all its holders."""
        entries, dealing = self.optimizer.entries(), self.optimizer.dealing
        return {
            number: {
                f"{self._names[s.number]}/{entry}.{s.start}": tensor
                for s in dealing.parts[number]
                for entry, tensor in entries[s].items()
            }
            for number in dealing.parts_of(self.optimizer.rank)
        }

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        """Reset the state; handover.py transfers it between ranks, and `read` loads files."""
        assert not pieces
        self.optimizer.install(self.optimizer.dealing, self.optimizer.rank, version=0)

    def begin(self, topology: Topology) -> None:
        """Assign shards that no rank holds yet: the state is as at the start of a run."""
        self.optimizer.install(self.optimizer.deal(topology), topology.rank, version=0)
        self._warn(topology)

    def hand_over(self, topology: Topology, step: int) -> bool:
        """See handover.py; False, on all ranks: no rank holds some shard any more."""
        try:
            hand_over(self.optimizer, topology, step)
        except ShardLostError:
            return False
        self._warn(topology)
        return True

    def _warn(self, topology: Topology) -> None:
        """Warn if a host holds all copies of a shard; with one copy every host does."""
        dealing, several = self.optimizer.dealing, len(topology.ranks_by_host()) > 1
        alone = hosts_that_hold_alone(dealing, topology.hosts)
        if topology.rank == 0 and several and len(dealing.holders[0]) > 1 and alone:
            logger.warning(
                "parallel.zero_copies %d: %s has too many of the ranks for copies on other hosts: "
                "its loss would send the run back to a checkpoint",
                len(dealing.holders[0]),
                " and ".join(alone),
            )

    def read(self, folder: Path, version: int) -> None:
        """Load this rank's shards from a checkpoint, whichever rank saved them.

        Args:
            version: the step that it was saved after.

        Raises:
            UserError: it does not match, or is damaged.
        """
        saved = open_part(folder, self.name, self._model)
        if saved is None:
            raise UserError(f"checkpoint {folder} has no state of an optimizer")
        known: dict[str, list[str]] = {}
        for key in saved.names():
            name, _, entry = key.rpartition("/")
            known.setdefault(name, []).append(entry)
        if unknown := sorted(known.keys() - set(self._names)):
            raise UserError(f"the checkpoint's optimizer knows parameters {unknown}")
        optimizer = self.optimizer
        entries = {
            s: {e: self._piece(saved, s, e) for e in known.get(self._names[s.number], ())}
            for s in optimizer.entries()
        }
        optimizer.install(optimizer.dealing, optimizer.rank, version, entries)

    def _piece(self, saved: SpreadPart, s: Slice, entry: str) -> Tensor:
        name = self._names[s.number]
        parameter = self.optimizer.parameters[s.number]
        if entry == _SCALAR:
            return saved.whole(f"{name}/{entry}")
        shape = saved.shape(f"{name}/{entry}")
        if shape != parameter.shape:
            raise UserError(
                f"the checkpoint's {entry} of {name} has the shape {[*shape]}, and the parameter "
                f"{[*parameter.shape]}; use the configuration it was made with, or another run.id"
            )
        return saved.range(f"{name}/{entry}", s.start, s.stop).to(parameter.device)
