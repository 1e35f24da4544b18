"""Replicas of a model that spans ranks: choice of processes, shard placement and transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.elastic.processes import TrainingProcess, choose
from hvdtrain.elastic.status import Identity, ProcessStatus
from hvdtrain.parallel.shards import ShardLostError, ShardMap, Transfer, placeholder, plan_transfers
from hvdtrain.process.strategy import ShardStatus, arrange
from hvdtrain.runtime.mesh import Grid

IDENTITY = Identity("cpu", "digest", 8, None)
AXES = {"tensor": 2, "context": 1, "shard": 1, "pipeline": 1}
PLACE = [*AXES]


def _process(
    number: int, host: str, size: int, shard: int | None, reachable_step: int = 9
) -> TrainingProcess:
    step = 0 if shard is None else 9
    status = ProcessStatus(
        IDENTITY, step=step, replica_size=size, shard=shard, reachable_step=reachable_step
    )
    return TrainingProcess(number, host, 0, status=status)


def _chosen(processes: list[TrainingProcess], most: int = 100) -> list[int]:
    return [process.number for process in choose(processes, most)]


def test_all_processes_are_chosen_if_a_replica_is_one_rank() -> None:
    processes = [_process(n, "a", 1, 0) for n in range(3)]
    assert _chosen(processes) == [0, 1, 2] and _chosen(processes, 2) == [0, 1]


def test_intact_replica_is_chosen_over_a_survivor_of_a_broken_one() -> None:
    # A rank of host a has died: the replica of host b continues; its ranks are neighbors.
    left = [_process(0, "a", 2, 0), _process(2, "b", 2, 0), _process(3, "b", 2, 1)]
    assert _chosen(left) == [2, 3]


def test_only_holder_of_a_shard_is_chosen() -> None:
    left = [_process(0, "a", 2, 0), _process(1, "a", 2, 0), _process(2, "b", 2, 1)]
    assert 2 in _chosen(left)


def test_only_process_that_completed_the_newest_step_is_chosen() -> None:
    # Process 3 of host b has died; process 2 took step 10, and the others can complete it.
    left = [_process(0, "a", 2, 0, 10), _process(1, "a", 2, 1, 10), _process(2, "b", 2, 0, 10)]
    assert left[2].status is not None
    left[2].status = replace(left[2].status, step=10)
    assert _chosen(left) == [1, 2]


def test_survivors_of_two_broken_replicas_form_one() -> None:
    assert _chosen([_process(0, "a", 2, 0), _process(3, "b", 2, 1)]) == [0, 3]


def test_spare_with_an_outdated_shard_does_not_count_as_its_holder() -> None:
    old = _process(0, "a", 2, 1, reachable_step=5)
    new = [_process(1, "b", 2, 0), _process(2, "c", 2, 1)]
    assert _chosen([old, *new]) == [1, 2]


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3)), max_size=12),
    st.integers(0, 12),
)
def test_only_whole_replicas_are_chosen_and_no_shard_is_lost(
    size: int, found: list[tuple[int, int | None]], most: int
) -> None:
    processes = [
        _process(number, f"host {host}", size, None if shard is None else shard % size)
        for number, (host, shard) in enumerate(found)
    ]
    chosen = choose(processes, most)
    if not processes:
        return
    assert len(chosen) == min(len(processes), most) // size * size
    if chosen:
        kept = Counter(p.status.shard for p in chosen if p.status)
        assert all(
            kept[p.status.shard] for p in processes if p.status and p.status.shard is not None
        )


@given(st.lists(st.tuples(st.integers(0, 2), st.none() | st.integers(0, 1)), min_size=1))
def test_ranks_keep_the_shards_they_hold(found: list[tuple[int, int | None]]) -> None:
    found = found[: len(found) // 2 * 2] or [(0, None), (0, None)]
    before = [shard for _, shard in found]
    grid = Grid.of([f"host {host}" for host, _ in found], AXES, PLACE, before)
    assert sorted(grid.ranks) == [*range(len(found))]
    kept = Counter(before[rank] for rank in grid.ranks if before[rank] == grid.shard(rank))
    for shard in (0, 1):
        assert kept[shard] == min(before.count(shard), grid.replicas)


def test_new_process_completes_the_replica_on_its_host() -> None:
    hosts = ["a", "a", "b", "b"]
    grid = Grid.of(hosts, AXES, PLACE, [1, None, 0, 1])
    assert grid.replica_of(0) == (1, 0) and grid.replica_of(2) == (2, 3)


def test_holder_of_the_newest_shard_takes_precedence_over_a_spare() -> None:
    spare, holder = ShardStatus(before=0), ShardStatus(shard=0, step=9, reachable_step=9, before=0)
    grid, moved = arrange(["a", "a"], [spare, holder], 9, AXES, PLACE)
    assert moved == [0] and grid.shard(1) == 0


def _plan(held: Sequence[int | None], grid: Grid) -> list[Transfer]:
    """Return the transfers that give every rank its shard of a model that spans ranks."""
    shard_map = ShardMap.of_replicas(grid)
    wanted = [shard_map.held_by(rank) for rank in range(len(held))]
    return plan_transfers([*map(placeholder, held)], wanted)


def test_shards_are_sent_from_their_holders_to_ranks_that_lack_them() -> None:
    grid = Grid((0, 1, 2, 3), {"tensor": 2})
    (zero,), (one,) = placeholder(0), placeholder(1)
    assert _plan([None, 1, 0, None], grid) == [Transfer(1, one, (3,)), Transfer(2, zero, (0,))]
    assert _plan([0, 1, 0, 1], grid) == []
    assert _plan([1, 0], Grid((0, 1), {"tensor": 2})) == [
        Transfer(0, one, (1,)),
        Transfer(1, zero, (0,)),
    ]
    with pytest.raises(ShardLostError, match="elements 1 to 2 of tensor 0"):
        _plan([0, None, 0, None], grid)


@given(st.integers(1, 4), st.data())
def test_every_rank_has_its_shard_after_the_transfers(size: int, data: st.DataObject) -> None:
    ranks = data.draw(st.permutations(range(size * data.draw(st.integers(1, 3)))))
    grid = Grid(tuple(ranks), {"tensor": size})
    one = st.none() | st.integers(0, size - 1)
    held = data.draw(st.lists(one, min_size=len(ranks), max_size=len(ranks)))
    if set(range(size)) - set(held):
        with pytest.raises(ShardLostError):
            _plan(held, grid)
        return
    after = [{shard} for shard in held]
    for source, interval, receivers in _plan(held, grid):
        assert interval.start == held[source] and source not in receivers
        for rank in receivers:
            assert held[rank] != interval.start, "it has this shard"
            after[rank].add(interval.start)
    assert all(grid.shard(rank) in after[rank] for rank in range(len(held)))
