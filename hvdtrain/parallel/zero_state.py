"""State of a sharded optimizer, as a part of the run's state, and its transfer between ranks.

`hand_over` runs when ranks have died, joined or left. A rank that holds a shard as of the most
advanced step sends it to the ranks that are to hold it next. Every rank makes the same calls in the
same order, because all calls follow from the facts that the ranks exchange first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.spread import SpreadPart, open_part
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.optim.optimizer import parameter_names
from hvdtrain.parallel.parts import Slice, hosts_that_hold_alone
from hvdtrain.parallel.zero import Entries, ShardedOptimizer
from hvdtrain.runtime.collectives import broadcast_tensors, gather_json
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.shards import Piece, ShardLostError
from hvdtrain.runtime.state_part import Scope

# Elements of each entry sent at once; as much memory is used in addition to the state.
_AT_ONCE = 8 << 20
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
        """Reset the state; `hand_over` transfers it between ranks, and `read` loads files."""
        assert not pieces
        self.optimizer.install(self.optimizer.dealing, self.optimizer.rank, version=0)

    def begin(self, topology: Topology) -> None:
        """Assign shards that no rank holds yet: the state is as at the start of a run."""
        self.optimizer.install(self.optimizer.deal(topology), topology.rank, version=0)
        self._warn(topology)

    def hand_over(self, topology: Topology, step: int) -> bool:
        """See the function; False, on all ranks: no rank holds some shard any more."""
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


@dataclass(frozen=True)
class Move:
    """Elements that one rank sends to all others.

    Args:
        source: the lowest rank that holds them.
        what: the elements.
    """

    source: int
    what: Slice


def hand_over(optimizer: ShardedOptimizer, topology: Topology, step: int) -> None:
    """Transfer every rank's shard of the new assignment to it, and complete all parameters.

    Ranks that could take the step of the most advanced rank have taken it. If a rank dies during
    the transfer, each rank still holds what it held before.

    Args:
        topology: the current ranks; some may be new, and have no parameters yet.
        step: of the most advanced rank.

    Raises:
        ShardLostError: on all ranks.
        RankLostError: another rank is gone.
    """
    valid = optimizer.version == step
    entries = optimizer.entries() if valid else {}
    told = {
        "held": [*entries],
        "entries": _described(entries),
        "complete": optimizer.complete or not valid,
    }
    facts = [_Facts.of(theirs) for theirs in gather_json(told, "zero.held")]
    dealing = optimizer.deal(topology)
    wanted = [dealing.held(rank) for rank in range(topology.world_size)]
    # Before the first step there is no state that could be lost.
    exists = any(of for f in facts for of in f.entries.values())
    moves = plan_moves([f.held for f in facts], wanted) if exists else []
    if not all(f.complete for f in facts):
        _complete(optimizer, facts)
    given = _move(moves, facts, entries, dealing.held(topology.rank), optimizer)
    optimizer.install(dealing, topology.rank, step, given)


@dataclass(frozen=True)
class _Facts:
    """What a rank holds, as of the most advanced step."""

    held: list[Slice]
    entries: dict[int, dict[str, tuple[str, float | None]]]
    complete: bool

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> _Facts:
        entries = {int(n): {e: (d, v) for e, (d, v) in of.items()} for n, of in told["entries"]}
        return cls([Slice(*s) for s in told["held"]], entries, told["complete"])


def _described(entries: Mapping[Slice, Entries]) -> list[Any]:
    """For each parameter: entry -> its dtype, and its value if it has no dimension."""
    found = {
        s.number: {
            name: [str(t.dtype).removeprefix("torch."), None if t.dim() else t.item()]
            for name, t in of.items()
        }
        for s, of in entries.items()
    }
    return [*found.items()]


def plan_moves(held: Sequence[Sequence[Slice]], wanted: Sequence[Sequence[Slice]]) -> list[Move]:
    """Decide who sends which elements: only those that a rank wants and does not hold.

    A pure function, so every rank computes the same plan.

    Args:
        held, wanted: slices of each rank.

    Returns:
        Moves of at most `_AT_ONCE` elements, ordered by source, then by slice. Each is sent to all
        ranks.

    Raises:
        ShardLostError: no rank holds some wanted elements.
    """
    held_by_parameter, wanted_by_parameter = _by_parameter(held), _by_parameter(wanted)
    moves: list[Move] = []
    for number, wants in wanted_by_parameter.items():
        has = held_by_parameter.get(number, [])
        for first, last in pairwise(_edges([*has, *wants])):
            holders, takers = _ranks_with(has, first, last), _ranks_with(wants, first, last)
            if takers <= holders:
                continue
            if not holders:
                raise ShardLostError(f"elements {first} to {last} of parameter {number}")
            source = min(holders)
            moves += [Move(source, piece) for piece in _pieces(Slice(number, first, last))]
    return sorted(moves, key=lambda move: (move.source, move.what))


class _Range(NamedTuple):
    """Elements of one parameter that a rank holds, or wants."""

    rank: int
    start: int
    stop: int


def _by_parameter(slices: Sequence[Sequence[Slice]]) -> dict[int, list[_Range]]:
    """Number of a parameter -> the ranges of all ranks in it."""
    found: dict[int, list[_Range]] = {}
    for rank, own in enumerate(slices):
        for number, start, stop in own:
            found.setdefault(number, []).append(_Range(rank, start, stop))
    return found


def _edges(ranges: Sequence[_Range]) -> list[int]:
    """Positions at which ranges begin or end: between two neighbors, the holders do not change."""
    return sorted({r.start for r in ranges} | {r.stop for r in ranges})


def _ranks_with(ranges: Sequence[_Range], first: int, last: int) -> set[int]:
    """The ranks that have all elements from `first` up to `last` in one range."""
    return {r.rank for r in ranges if r.start <= first and last <= r.stop}


def _pieces(s: Slice) -> list[Slice]:
    """The slice in pieces of at most `_AT_ONCE` elements."""
    starts = range(s.start, s.stop, _AT_ONCE)
    return [Slice(s.number, start, min(start + _AT_ONCE, s.stop)) for start in starts]


def _complete(optimizer: ShardedOptimizer, facts: Sequence[_Facts]) -> None:
    """Give every rank the parameters of the ranks that updated them."""
    whole = [Slice(n, 0, p.numel()) for n, p in enumerate(optimizer.parameters)]
    moves = plan_moves([f.held for f in facts], [whole] * len(facts))

    def rows(move: Move) -> dict[str, Tensor]:
        number, start, stop = move.what
        return {f"{number}.{start}": optimizer.flat(number)[start:stop]}

    for _ in _broadcast(moves, rows, "zero.parameters"):
        pass


def _move(
    moves: Sequence[Move],
    facts: Sequence[_Facts],
    old: Mapping[Slice, Entries],
    wanted: Sequence[Slice],
    optimizer: ShardedOptimizer,
) -> dict[Slice, Entries]:
    """Entries of each slice that this rank wants, from its old entries and from other ranks."""
    known = {number: of for f in reversed(facts) for number, of in f.entries.items()}
    new = {s: _empty(s, known.get(s.number, {}), optimizer) for s in wanted}
    for s, entries in old.items():
        _take(new, s, entries)

    def rows(move: Move) -> dict[str, Tensor]:
        described = known.get(move.what.number, {})
        row = _empty(move.what, described, optimizer)
        for s, entries in old.items():
            _take({move.what: row}, s, entries)
        return {
            f"{move.what.number}.{move.what.start}.{name}": row[name]
            for name, (_, value) in described.items()
            if value is None
        }

    for move, received in _broadcast(moves, rows, "zero.state"):
        named = {key.rpartition(".")[2]: tensor for key, tensor in received.items()}
        _take(new, move.what, named)
    return new


def _empty(
    s: Slice, described: Mapping[str, tuple[str, float | None]], optimizer: ShardedOptimizer
) -> Entries:
    device = optimizer.parameters[s.number].device
    return {
        name: torch.empty(s.stop - s.start, dtype=getattr(torch, dtype), device=device)
        if value is None
        else torch.tensor(value, dtype=getattr(torch, dtype))
        for name, (dtype, value) in described.items()
    }


def _take(new: Mapping[Slice, Entries], given: Slice, entries: Entries) -> None:
    """Copy the overlap of `given` with each slice into that slice."""
    for s, own in new.items():
        start, stop = max(s.start, given.start), min(s.stop, given.stop)
        if s.number != given.number or start >= stop:
            continue
        for name, tensor in entries.items():
            if tensor.dim():
                own[name][start - s.start : stop - s.start] = tensor[
                    start - given.start : stop - given.start
                ]


def _broadcast(
    moves: Sequence[Move], rows: Callable[[Move], dict[str, Tensor]], name: str
) -> Iterator[tuple[Move, dict[str, Tensor]]]:
    """Yield each move with its received tensors, a few moves at a time.

    Args:
        rows: the tensors of a move: on its source the data, on other ranks memory to receive it.
    """
    for source, of_source in groupby(moves, key=lambda move: move.source):
        for number, batch in enumerate(_batches(of_source)):
            made = [(move, rows(move)) for move in batch]
            tensors = {key: row for _, of_move in made for key, row in of_move.items()}
            if tensors:
                broadcast_tensors(tensors, f"{name}.{source}.{number}", source)
            yield from made


def _batches(moves: Iterable[Move]) -> Iterator[list[Move]]:
    batch, elements = list[Move](), 0
    for move in moves:
        size = move.what.stop - move.what.start
        if batch and elements + size > _AT_ONCE:
            yield batch
            batch, elements = [], 0
        batch.append(move)
        elements += size
    if batch:
        yield batch
