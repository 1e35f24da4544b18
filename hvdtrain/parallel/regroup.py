"""The parts of a model that spans ranks, on their way to the replicas of the next generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdtrain.runtime.collectives import broadcast_json, broadcast_tensors
from hvdtrain.runtime.grid import Grid
from hvdtrain.runtime.process_sets import ProcessSet, passing_set


@dataclass
class HeldPart:
    """What a rank holds of a model that spans ranks, and of its optimizer.

    Args:
        number: of the part, see Grid.part.
        step: optimizer steps done.
        tensors: this rank's own pieces, by "model/name" and "optimizer/name/entry".
    """

    number: int
    step: int
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Transfer:
    """A part on its way from a rank to others."""

    part: int
    source: int
    receivers: tuple[int, ...]


class PartLostError(Exception):
    """No rank holds some part any more; all ranks know it."""


def plan(held: Sequence[int | None], grid: Grid) -> list[Transfer]:
    """What has to travel so that every rank holds its part.

    Args:
        held: the part that each rank holds as of the most advanced step, or None.

    Raises:
        PartLostError: see there.
    """
    transfers = []
    for part in range(grid.replica_size):
        if part not in held:
            raise PartLostError(f"part {part} of {grid.replica_size}")
        wanted = [rank for rank in grid.ranks if grid.part(rank) == part]
        lacking = sorted(rank for rank in wanted if held[rank] != part)
        if lacking:
            transfers.append(Transfer(part, held.index(part), (*lacking,)))
    return transfers


def transfer(
    transfers: Sequence[Transfer], rank: int, own: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Every rank calls it; returns what this one receives, None: nothing.

    Args:
        rank: this one.
        own: the tensors of the part that it holds; left as they are.
    """
    received = None
    for each in transfers:
        among = sorted({each.source, *each.receivers})
        with passing_set(among) as group:
            if rank == each.source:
                _broadcast(own, each, group)
            elif rank in among:
                received = _broadcast({}, each, group)
    return received


def _broadcast(own: Mapping[str, Tensor], each: Transfer, group: ProcessSet) -> dict[str, Tensor]:
    layout = {key: [[*t.shape], str(t.dtype).removeprefix("torch.")] for key, t in own.items()}
    name = f"part.{each.part}"
    theirs = broadcast_json(layout, f"{name}.layout", each.source, group)
    tensors = {
        key: own[key].cpu() if key in own else torch.empty(shape, dtype=getattr(torch, dtype))
        for key, (shape, dtype) in theirs.items()
    }
    broadcast_tensors(tensors, name, each.source, group)
    return tensors
