"""Which processes form replicas of a model that spans ranks, where parts go, and who has them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.elastic.failures import ProcessStatus
from hvdtrain.elastic.identity import Identity
from hvdtrain.elastic.process import Process
from hvdtrain.elastic.replicas import choose
from hvdtrain.parallel.regroup import PartLostError, plan
from hvdtrain.run.replicas import PartStatus, arrange
from hvdtrain.runtime.grid import Grid

IDENTITY = Identity("cpu", "digest", 8, None)
AXES = {"tensor": 2, "context": 1, "shard": 1, "pipeline": 1}
PLACE = [*AXES]


def _process(number: int, host: str, size: int, part: int | None, reaches: int = 9) -> Process:
    step = 0 if part is None else 9
    status = ProcessStatus(IDENTITY, step=step, replica_size=size, part=part, reaches=reaches)
    return Process(number, host, 0, status=status)


def _chosen(processes: list[Process], most: int = 100) -> list[int]:
    return [process.number for process in choose(processes, most)]


def test_models_that_do_not_span_ranks_leave_a_process_out() -> None:
    processes = [_process(n, "a", 1, 0) for n in range(3)]
    assert _chosen(processes) == [0, 1, 2] and _chosen(processes, 2) == [0, 1]


def test_the_survivor_of_a_broken_replica_breaks_another_one() -> None:
    # One of host a has died: the replica of host b trains on, whose ranks are neighbours.
    left = [_process(0, "a", 2, 0), _process(2, "b", 2, 0), _process(3, "b", 2, 1)]
    assert _chosen(left) == [2, 3]


def test_the_only_holder_of_a_part_is_left_out() -> None:
    left = [_process(0, "a", 2, 0), _process(1, "a", 2, 0), _process(2, "b", 2, 1)]
    assert 2 in _chosen(left)


def test_survivors_of_two_broken_replicas_do_not_form_one() -> None:
    assert _chosen([_process(0, "a", 2, 0), _process(3, "b", 2, 1)]) == [0, 3]


def test_a_spare_with_an_old_part_counts_as_its_holder() -> None:
    old = _process(0, "a", 2, 1, reaches=5)
    new = [_process(1, "b", 2, 0), _process(2, "c", 2, 1)]
    assert _chosen([old, *new]) == [1, 2]


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3)), max_size=12),
    st.integers(0, 12),
)
def test_more_than_whole_replicas_take_part_or_a_part_is_lost(
    size: int, found: list[tuple[int, int | None]], most: int
) -> None:
    processes = [
        _process(number, f"host {host}", size, None if part is None else part % size)
        for number, (host, part) in enumerate(found)
    ]
    chosen = choose(processes, most)
    if not processes:
        return
    assert len(chosen) == min(len(processes), most) // size * size
    if chosen:
        kept = Counter(p.status.part for p in chosen if p.status)
        assert all(kept[p.status.part] for p in processes if p.status and p.status.part is not None)


@given(st.lists(st.tuples(st.integers(0, 2), st.none() | st.integers(0, 1)), min_size=1))
def test_a_rank_gets_another_part_than_it_had(found: list[tuple[int, int | None]]) -> None:
    found = found[: len(found) // 2 * 2] or [(0, None), (0, None)]
    before = [part for _, part in found]
    grid = Grid.of([f"host {host}" for host, _ in found], AXES, PLACE, before)
    assert sorted(grid.ranks) == [*range(len(found))]
    kept = Counter(before[rank] for rank in grid.ranks if before[rank] == grid.part(rank))
    for part in (0, 1):
        assert kept[part] == min(before.count(part), grid.replicas)


def test_a_new_process_goes_where_a_neighbour_lacks_it() -> None:
    hosts = ["a", "a", "b", "b"]
    grid = Grid.of(hosts, AXES, PLACE, [1, None, 0, 1])
    assert grid.replica_of(0) == (1, 0) and grid.replica_of(2) == (2, 3)


def test_holder_of_the_newest_shard_keeps_its_part_before_a_spare() -> None:
    spare, holder = PartStatus(before=0), PartStatus(part=0, step=9, reaches=9, before=0)
    grid, moved = arrange(["a", "a"], [spare, holder], 9, AXES, PLACE)
    assert moved == [0] and grid.part(1) == 0


def test_a_part_is_given_by_one_that_is_behind_or_to_one_that_has_it() -> None:
    grid = Grid((0, 1, 2, 3), {"tensor": 2})
    moves = plan([None, 1, 0, None], grid)
    assert [(m.part, m.source, m.receivers) for m in moves] == [(0, 2, (0,)), (1, 1, (3,))]
    assert plan([0, 1, 0, 1], grid) == []
    assert plan([1, 0], Grid((0, 1), {"tensor": 2}))[0].receivers == (0,)
    with pytest.raises(PartLostError, match="part 1 of 2"):
        plan([0, None, 0, None], grid)
