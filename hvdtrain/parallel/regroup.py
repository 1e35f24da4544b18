"""Transfer of the shards of a model that spans ranks to the next generation's replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdtrain.runtime.collectives import ProcessSet, broadcast_json, broadcast_tensors, passing_set
from hvdtrain.runtime.mesh import Grid
from hvdtrain.runtime.pieces import ShardLostError


@dataclass(frozen=True)
class HeldShard:
    """One version of a rank's shard in a run whose model spans ranks; it moves as a unit.

    Args:
        number: of the shard of the model, see Grid.part.
        progress: progress of the run, the fields of a Progress.
        applied: see AppliedSteps.
        tensors: this rank's pieces by "model/name", "optimizer/name/entry" and similar names, and
            replicated tensors ("loss_scale/scale").
    """

    number: int
    progress: dict[str, Any]
    applied: int
    tensors: dict[str, Tensor]

    @property
    def step(self) -> int:
        """The step after which it is the state."""
        return int(self.progress["step"])


@dataclass(frozen=True)
class Transfer:
    """Shard that one rank sends to others."""

    shard: int
    source: int
    receivers: tuple[int, ...]


def plan_transfers(held: Sequence[int | None], grid: Grid) -> list[Transfer]:
    """Plan the transfers that give every rank its shard.

    Args:
        held: the shard that each rank holds as of the most advanced step, or None.

    Raises:
        ShardLostError: no rank holds some shard.
    """
    transfers = []
    for shard in range(grid.replica_size):
        if shard not in held:
            raise ShardLostError(f"shard {shard} of {grid.replica_size}")
        wanted = [rank for rank in grid.ranks if grid.part(rank) == shard]
        lacking = sorted(rank for rank in wanted if held[rank] != shard)
        if lacking:
            transfers.append(Transfer(shard, held.index(shard), (*lacking,)))
    return transfers


def transfer(transfers: Sequence[Transfer], rank: int, own: HeldShard | None) -> HeldShard | None:
    """Run the transfers and return the shard that this rank receives, or None.

    Every rank calls it.

    Args:
        rank: this one.
        own: the shard that it holds; not changed.
    """
    received = None
    for each in transfers:
        among = sorted({each.source, *each.receivers})
        with passing_set(among) as group:
            if rank == each.source:
                _broadcast(own, each, group)
            elif rank in among:
                received = _broadcast(None, each, group)
    return received


def _broadcast(own: HeldShard | None, each: Transfer, group: ProcessSet) -> HeldShard:
    held: Mapping[str, Tensor] = own.tensors if own else {}
    layout = {key: [[*t.shape], str(t.dtype).removeprefix("torch.")] for key, t in held.items()}
    name = f"part.{each.shard}"
    told = [layout, own.progress, own.applied] if own else None
    theirs, progress, applied = broadcast_json(told, f"{name}.layout", each.source, group)
    tensors = {
        key: held[key].cpu() if key in held else torch.empty(shape, dtype=getattr(torch, dtype))
        for key, (shape, dtype) in theirs.items()
    }
    broadcast_tensors(tensors, name, each.source, group)
    return HeldShard(each.shard, progress, applied, tensors)
