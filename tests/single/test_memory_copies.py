"""Copies of shards in host memory: receivers, transfer, and the step that they restore."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.checkpoint.config import MemoryCopiesConfig
from hvdtrain.engine.callbacks.copies import KeepCopies, check_memory
from hvdtrain.engine.loop import Progress
from hvdtrain.errors import UserError
from hvdtrain.parallel.agreement import Agreement
from hvdtrain.parallel.copies import MemoryCopies, buddies, common_step
from hvdtrain.parallel.spanned import HeldShard
from hvdtrain.runtime.mesh import Topology
from tests.support.thread_ranks import on_ranks

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)
SHARDS = 3
HELD = st.lists(
    st.sets(st.tuples(st.integers(0, SHARDS - 1), st.sampled_from([5, 10, 15]))), max_size=4
)
SECONDS = 20.0


@given(HOSTS, st.integers(1, 4))
def test_copies_are_on_as_many_other_hosts_as_configured(hosts: list[str], copies: int) -> None:
    others = len(set(hosts)) - 1
    for rank, host in enumerate(hosts):
        found = buddies(hosts, rank, copies)
        assert rank not in found and len(set(found)) == len(found)
        if others:
            assert host not in {hosts[buddy] for buddy in found}
            assert len({hosts[buddy] for buddy in found}) == len(found) == min(copies, others)
        else:
            assert len(found) == min(copies, len(hosts) - 1)


@given(st.integers(2, 4), st.integers(1, 4))
def test_ranks_of_equal_hosts_keep_equally_many_copies(hosts: int, slots: int) -> None:
    names = [str(host) for host in range(hosts) for _ in range(slots)]
    kept = [buddy for rank in range(len(names)) for buddy in buddies(names, rank, 1)]
    assert sorted(kept) == list(range(len(names)))


@given(HOSTS.filter(lambda hosts: len(set(hosts)) > 1), st.data())
def test_loss_of_any_host_leaves_a_copy_of_every_shard(
    hosts: list[str], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(sorted(set(hosts))))
    held: list[set[tuple[int, int]]] = [{(rank, 5)} for rank in range(len(hosts))]
    for rank in range(len(hosts)):
        for buddy in buddies(hosts, rank, 1):
            held[buddy].add((rank, 5))
    left = [own for own, host in zip(held, hosts, strict=True) if host != lost]
    assert common_step(left, len(hosts)) == 5


@given(HELD)
def test_run_returns_to_the_newest_step_with_copies_of_all_shards(
    held: list[set[tuple[int, int]]],
) -> None:
    found = common_step(held, SHARDS)
    known = set().union(*held)
    whole = [step for step in (5, 10, 15) if {(n, step) for n in range(SHARDS)} <= known]
    assert found == (whole[-1] if whole else None)


def _shard(number: int, step: int) -> HeldShard:
    generator = torch.Generator().manual_seed(100 * number + step)
    tensors = {
        "model/weight": torch.randn(3, 5, generator=generator),
        "model/half": torch.randn(7, generator=generator).bfloat16(),
        "optimizer/weight/step": torch.tensor(float(step)),
        "model/empty": torch.empty(0, 4),
    }
    return HeldShard(number, {"step": step, "samples": 8 * step}, step, tensors)


def _equal(one: HeldShard, other: HeldShard) -> bool:
    same = (one.number, one.progress, one.applied) == (other.number, other.progress, other.applied)
    return same and all(torch.equal(t, other.tensors[name]) for name, t in one.tensors.items())


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def pair() -> Iterator[tuple[MemoryCopies, MemoryCopies]]:
    """Two processes' copies; each is the other's buddy in generation "first" from step 0 on."""
    both = MemoryCopies(b"secret"), MemoryCopies(b"secret")
    ports = [copies.begin("first", 0, "127.0.0.1") for copies in both]
    for copies, port in zip(both, reversed(ports), strict=True):
        copies.send_to([("127.0.0.1", port)])
    yield both
    for copies in both:
        copies.leave()


def _take(copies: MemoryCopies, shard: HeldShard, since: int | None = None) -> None:
    copies.take(shard, 0.0, since)
    copies.wait(SECONDS)
    assert not copies.unverified


def test_copy_arrives_bitwise_identical_at_the_buddy(pair: tuple[MemoryCopies, ...]) -> None:
    shard = _shard(1, 5)
    expected = _shard(1, 5)
    pair[1].take(shard, 0.0, None)
    for tensor in shard.tensors.values():
        tensor.zero_()  # training continues at once
    pair[1].wait(SECONDS)
    for copies in pair:
        assert copies.store.held() == [(1, 5)]
        assert _equal(copies.store.shards(5, {1})[1], expected)


def test_two_versions_of_each_copy_are_kept_in_the_same_memory(
    pair: tuple[MemoryCopies, ...],
) -> None:
    sizes = []
    for step, since in ((5, None), (10, 5), (15, 10), (20, 15)):
        for number, copies in enumerate(pair):
            _take(copies, _shard(number, step), since)
        sizes.append([copies.store.nbytes() for copies in pair])
    for copies in pair:
        assert copies.store.held() == [(0, 15), (0, 20), (1, 15), (1, 20)]
    assert sizes[-1] == sizes[1] == [2 * size for size in sizes[0]]


def test_damaged_copy_is_found_and_dropped(pair: tuple[MemoryCopies, ...]) -> None:
    for step in (5, 10):
        _take(pair[0], _shard(0, step))
    store = pair[1].store
    store._copies[0, 10].content[3] ^= 1
    assert store.drop_damaged(5) == [] and store.drop_damaged(10) == [0]
    assert store.held() == [(0, 5)]
    assert pair[0].store.drop_damaged(10) == []


def test_copies_of_another_generation_or_job_are_refused(pair: tuple[MemoryCopies, ...]) -> None:
    stranger, late = MemoryCopies(b"another secret"), MemoryCopies(b"secret")
    receiver, port = pair[0], pair[0].begin("first", 0, "127.0.0.1")
    for sender, claim in ((stranger, "first"), (late, "earlier")):
        sender.begin(claim, 0, "127.0.0.1")
        sender.send_to([("127.0.0.1", port)])
        sender.take(_shard(1, 5), 0.0, None)
        sender.wait(0.5)
        assert sender.unverified
        sender.leave()
    assert receiver.store.held() == []


def test_copy_is_sent_again_until_the_buddy_accepts_it(pair: tuple[MemoryCopies, ...]) -> None:
    pair[1].leave()
    pair[0].take(_shard(0, 5), 0.0, None)
    pair[0].wait(0.3)
    assert pair[0].unverified
    pair[1].begin("first", 0, "127.0.0.1")
    _wait(lambda: not pair[0].unverified)
    assert pair[1].store.held() == [(0, 5)]


def test_generation_drops_copies_of_steps_that_the_run_has_left(
    pair: tuple[MemoryCopies, ...],
) -> None:
    for step in (5, 10):
        _take(pair[0], _shard(0, step))
    pair[0].leave()
    pair[0].begin("second", 7, "127.0.0.1")
    assert pair[0].store.held() == [(0, 5)]


def test_copy_is_paced_over_part_of_a_step(pair: tuple[MemoryCopies, ...]) -> None:
    large = HeldShard(0, {"step": 1}, 1, {"model/weight": torch.zeros(2 << 20)})  # 8 MiB
    begin = time.monotonic()
    pair[0].take(large, 1.0, None)
    stalled = time.monotonic() - begin
    pair[0].wait(SECONDS)
    assert pair[0].seconds > 0.3 and stalled < 0.3


def test_copies_that_exceed_the_memory_of_a_host_are_refused() -> None:
    topology, config = Topology(0, 2, 0, 1, ("a", "b")), MemoryCopiesConfig(every=5)
    check_memory(config, topology, shard_bytes=1 << 10)
    with pytest.raises(UserError, match=r"need \d+ MiB on a, which has \d+ MiB free"):
        check_memory(config, topology, shard_bytes=1 << 60)


def _keep_copies(
    rank: int, steps: Iterable[int], step_seconds: float, reaches_its_buddy: bool = True
) -> tuple[MemoryCopies, int]:
    """Run the steps of one of two ranks; return its copies, and the `late` of the last step."""
    topology = Topology(rank, 2, rank, 2, ("localhost",) * 2)
    timer = SimpleNamespace(inside=lambda phase: nullcontext())
    context: Any = SimpleNamespace(mesh=SimpleNamespace(topology=topology), timer=timer, claim="a")
    copies, agreement, progress = MemoryCopies(b"secret"), Agreement(), Progress()
    keep = KeepCopies(
        MemoryCopiesConfig(every=5),
        copies,
        lambda: _shard(rank, progress.step),
        agreement,
        context,
        0,
    )
    if not reaches_its_buddy:
        copies.send_to([("127.0.0.1", 1)])
    loop: Any = SimpleNamespace(progress=progress, generation_ends=False, topology=topology)
    for step in steps:
        agreement.wait(step, lambda: None)
        progress.step = step
        keep.on_step(loop, {"step_seconds": step_seconds})
    copies.wait(SECONDS if reaches_its_buddy else 0.5)
    return copies, agreement.late


def test_copies_are_taken_after_the_first_step_and_every_few_steps() -> None:
    ranks = [partial(_keep_copies, rank, range(1, 12), SECONDS) for rank in range(2)]
    (first, _), (second, late) = on_ranks(ranks)
    assert late == 0 and first.complete_step == second.complete_step == 10
    for copies in (first, second):
        own = [step for number, step in copies.store.held() if number == (copies is second)]
        assert own == [5, 10]
        copies.leave()


def test_copies_of_steps_that_a_run_leaves_without_a_failure_are_dropped() -> None:
    steps = [*range(1, 14), 8, 9]  # from a checkpoint of step 7 on
    for copies, _ in on_ranks([partial(_keep_copies, rank, steps, SECONDS) for rank in range(2)]):
        assert {step for _, step in copies.store.held()} == {5, 8}
        copies.leave()


def test_ranks_take_no_new_copies_before_the_last_ones_are_verified() -> None:
    ranks = [
        partial(_keep_copies, rank, range(1, 21), 0.3, reaches_its_buddy=rank == 0)
        for rank in range(2)
    ]
    (first, late), (second, _) = on_ranks(ranks)
    assert late == 1 and second.stall_seconds < 2.0  # it has waited once, for one step
    for copies in (first, second):
        assert {step for _, step in copies.store.held()} == {1}
        assert copies.complete_step == 0
        copies.leave()
