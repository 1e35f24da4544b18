"""Which rank sends which elements of a sharded optimizer: any holders, any new assignment."""

from __future__ import annotations

import random
import re
from collections import defaultdict

import pytest

from hvdtrain.parallel import zero_state
from hvdtrain.parallel.parts import Slice, deal
from hvdtrain.parallel.zero_state import Move, plan_moves
from hvdtrain.runtime.shards import ShardLostError

Element = tuple[int, int]  # number of the parameter, index
SIZES = [7, 1, 0, 12]


@pytest.fixture(autouse=True)
def _small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_state, "_AT_ONCE", 3)


def _elements(slices: list[Slice]) -> set[Element]:
    return {(s.number, index) for s in slices for index in range(s.start, s.stop)}


def _random_slices(draw: random.Random, most: int) -> list[Slice]:
    """Some slices, which may overlap and which may be empty."""
    found = []
    for _ in range(draw.randint(0, most)):
        number = draw.randrange(len(SIZES))
        start, stop = sorted(draw.randint(0, SIZES[number]) for _ in range(2))
        found.append(Slice(number, start, stop))
    return found


def _assert_sufficient_and_minimal(
    moves: list[Move], held: list[list[Slice]], wanted: list[list[Slice]]
) -> None:
    has, wants = [*map(_elements, held)], [*map(_elements, wanted)]
    sent: dict[Element, int] = defaultdict(int)
    for move in moves:
        assert 0 < move.what.stop - move.what.start <= 3
        for element in _elements([move.what]):
            sent[element] += 1
            holders = [rank for rank, own in enumerate(has) if element in own]
            assert move.source == min(holders), "not the lowest rank that holds it"
    assert max(sent.values(), default=1) == 1, "an element is sent twice"
    missing = set[Element]().union(*(w - h for h, w in zip(has, wants, strict=True)))
    assert set(sent) == missing
    assert moves == sorted(moves, key=lambda move: (move.source, move.what))


@pytest.mark.parametrize("seed", range(100))
def test_plan_sends_each_missing_element_once_from_its_lowest_holder(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(1, 5)
    wanted = [_random_slices(draw, 3) for _ in range(ranks)]
    pool = [s for own in wanted for s in own]  # drawn from these, often nothing is lost
    held = [draw.sample(pool, draw.randint(0, len(pool))) for _ in range(ranks)]
    lost = set[Element]().union(*map(_elements, wanted)) - set().union(*map(_elements, held))
    if lost:
        with pytest.raises(ShardLostError) as raised:
            plan_moves(held, wanted)
        found = re.fullmatch(r"elements (\d+) to (\d+) of parameter (\d+)", str(raised.value))
        assert found
        first, last, number = map(int, found.groups())
        assert {(number, index) for index in range(first, last)} <= lost
    else:
        _assert_sufficient_and_minimal(plan_moves(held, wanted), held, wanted)


@pytest.mark.parametrize("seed", range(50))
def test_plan_reaches_any_assignment_that_the_survivors_can_serve(seed: int) -> None:
    draw = random.Random(seed)
    before, after = draw.randint(2, 6), draw.randint(2, 6)
    copies = draw.randint(2, 3)
    old = deal(SIZES, [str(rank) for rank in range(before)], copies)
    new = deal(SIZES, [str(rank) for rank in range(after)], copies)
    dead = draw.randrange(before)  # fewer than the copies
    alive = [old.held(rank) for rank in range(before) if rank != dead]
    ranks = max(len(alive), after)
    held = [*alive, *([] for _ in range(ranks - len(alive)))]
    wanted = [new.held(rank) if rank < after else [] for rank in range(ranks)]
    _assert_sufficient_and_minimal(plan_moves(held, wanted), held, wanted)


def test_plan_sends_nothing_that_all_who_want_it_hold() -> None:
    whole = [Slice(0, 0, 7)]
    assert plan_moves([whole, whole, []], [whole, [Slice(0, 2, 5)], []]) == []
