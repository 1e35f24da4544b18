"""Which ranks hold which elements, and which transfers a change of ranks needs."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.parallel import zero_state
from hvdtrain.parallel.shards import Interval, ShardLostError, ShardMap, Transfer, plan_transfers
from hvdtrain.runtime.mesh import Grid

Element = tuple[int, int]  # number of the tensor, index
Held = list[list[Interval]]  # of each rank
SIZES = [7, 1, 0, 12]

_intervals = st.builds(
    lambda tensor, ends: Interval(tensor, *sorted(end % (SIZES[tensor] + 1) for end in ends)),
    st.integers(0, len(SIZES) - 1),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
)


def _elements(intervals: list[Interval]) -> set[Element]:
    return {(i.tensor, index) for i in intervals for index in range(i.start, i.stop)}


def _assert_sufficient_and_minimal(transfers: list[Transfer], held: Held, wanted: Held) -> None:
    has, wants = [*map(_elements, held)], [*map(_elements, wanted)]
    sent = Counter[Element]()
    for source, interval, receivers in transfers:
        for element in _elements([interval]):
            sent[element] += 1
            holders = [rank for rank, own in enumerate(has) if element in own]
            assert source == min(holders), "not the lowest rank that holds it"
            lacking = [rank for rank, own in enumerate(wants) if element in own - has[rank]]
            assert [*receivers] == lacking
    assert max(sent.values(), default=1) == 1, "an element is sent twice"
    assert set(sent) == set[Element]().union(*(w - h for h, w in zip(has, wants, strict=True)))
    assert transfers == sorted(transfers)


@given(st.data())
def test_each_missing_element_is_sent_once_from_its_lowest_holder(data: st.DataObject) -> None:
    wanted: Held = data.draw(st.lists(st.lists(_intervals, max_size=3), min_size=1, max_size=5))
    pool = [interval for own in wanted for interval in own]  # often nothing is lost
    some = st.lists(st.sampled_from(pool), unique=True) if pool else st.just(list[Interval]())
    held: Held = [data.draw(some) for _ in wanted]
    lost = set[Element]().union(*map(_elements, wanted)) - set().union(*map(_elements, held))
    if not lost:
        _assert_sufficient_and_minimal(plan_transfers(held, wanted), held, wanted)
        return
    with pytest.raises(ShardLostError) as raised:
        plan_transfers(held, wanted)
    found = re.fullmatch(r"elements (\d+) to (\d+) of tensor (\d+)", str(raised.value))
    assert found
    first, last, tensor = map(int, found.groups())
    assert {(tensor, index) for index in range(first, last)} <= lost


@given(st.integers(2, 6), st.integers(2, 6), st.integers(2, 3), st.integers(0, 5))
def test_survivors_can_serve_any_new_assignment(
    before: int, after: int, copies: int, dead: int
) -> None:
    old = ShardMap.even(SIZES, [str(rank) for rank in range(before)], copies)
    new = ShardMap.even(SIZES, [str(rank) for rank in range(after)], copies)
    # One rank is lost, fewer than the copies.
    alive = [old.held_by(rank) for rank in range(before) if rank != dead % before]
    ranks = max(len(alive), after)
    held = [*alive, *([] for _ in range(ranks - len(alive)))]
    wanted = [new.held_by(rank) if rank < after else [] for rank in range(ranks)]
    _assert_sufficient_and_minimal(plan_transfers(held, wanted), held, wanted)


def test_elements_that_all_receivers_hold_are_not_sent() -> None:
    whole = [Interval(0, 0, 7)]
    assert plan_transfers([whole, whole, []], [whole, [Interval(0, 2, 5)], []]) == []


@given(
    st.lists(st.integers(0, 50), max_size=6),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_shards_are_even_and_cover_every_element_once(
    sizes: list[int], hosts: list[str], copies: int
) -> None:
    shard_map = ShardMap.even(sizes, hosts, copies)
    counted = Counter(
        element for shard in shard_map.shards for element in sorted(_elements([*shard]))
    )
    assert set(counted.values()) <= {1} and counted.total() == sum(sizes)
    lengths = [sum(i.stop - i.start for i in shard) for shard in shard_map.shards]
    assert len(lengths) == len(hosts) and max(lengths) - min(lengths) <= 1
    for shard, ranks in enumerate(shard_map.holders):
        assert ranks[0] == shard and len({*ranks}) == len(ranks) == min(copies, len(hosts))
    if copies * max(Counter(hosts).values()) <= len(hosts):
        for ranks in shard_map.holders:
            assert len({hosts[rank] for rank in ranks}) == copies, "they could be on other hosts"


@given(st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_each_replica_holds_each_shard_of_a_spanning_model(
    size: int, replicas: int, order: random.Random
) -> None:
    ranks = [*range(size * replicas)]
    order.shuffle(ranks)
    grid = Grid(tuple(ranks), {"tensor": size})
    shard_map = ShardMap.of_replicas(grid)
    for rank in ranks:
        assert shard_map.shards_of(rank) == [grid.shard(rank)]
    for shard, holders in enumerate(shard_map.holders):
        assert [*holders] == [grid.replica_of(rank)[shard] for rank in holders]
        assert len({grid.coordinates(rank)["data"] for rank in holders}) == replicas


def test_transfers_are_sent_in_batches_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_state, "_AT_ONCE", 3)
    given = [Interval(0, 0, 7), Interval(1, 4, 5), Interval(1, 5, 6), Interval(2, 0, 3)]
    batches = [*zero_state._batches(given)]
    assert all(sum(i.stop - i.start for i in batch) <= 3 for batch in batches)
    sent = [i for batch in batches for i in batch]
    assert sent == sorted(sent) and _elements(sent) == _elements(given)
    assert len(batches) == 4
