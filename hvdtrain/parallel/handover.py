"""State transfer of a sharded optimizer to the ranks of the next generation.

Ranks have died, joined or left. A rank that holds a shard as of the most advanced step sends it to
the ranks that are to hold it next. Every rank makes the same calls in the same order, because all
calls follow from the facts that the ranks exchange first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.parallel.parts import Slice
from hvdtrain.parallel.zero import Entries, ShardedOptimizer
from hvdtrain.runtime.collectives import broadcast_tensors, gather_json
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.pieces import ShardLostError

# Elements of each entry sent at once; as much memory is used in addition to the state.
_AT_ONCE = 8 << 20


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
