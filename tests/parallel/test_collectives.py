"""Collectives other than gradient synchronization."""

from __future__ import annotations

import time

import pytest
import torch

from hvdtrain.errors import UserError
from hvdtrain.runtime.collectives import (
    AgreedError,
    broadcast_json,
    broadcast_tensors,
    chunk_bytes,
    gather_json,
    on_all_ranks,
    sum_,
)
from hvdtrain.runtime.mesh import Topology


def test_broadcast_json_gives_every_rank_the_value_of_rank_0(topology: Topology) -> None:
    for value in (None, "", {"a": [1, 2.5, None]}, "ü" * 100_000, 2**70):
        own = value if topology.rank == 0 else f"of rank {topology.rank}"
        assert broadcast_json(own, "value") == value


def test_gather_json_returns_values_of_any_length_in_rank_order(topology: Topology) -> None:
    gathered = gather_json({"rank": topology.rank, "text": "é" * 1000 * topology.rank}, "value")
    assert gathered == [{"rank": r, "text": "é" * 1000 * r} for r in range(topology.world_size)]


def test_on_all_ranks_returns_the_own_result_if_no_rank_fails(topology: Topology) -> None:
    assert on_all_ranks("part", lambda: topology.rank) == topology.rank


@pytest.mark.parametrize("failing", ["first", "last", "all"])
def test_on_all_ranks_raises_the_first_failing_ranks_error_on_all(
    topology: Topology, failing: str
) -> None:
    last = topology.world_size - 1
    ranks = {"first": [0], "last": [last], "all": list(range(last + 1))}[failing]

    def part() -> None:
        if topology.rank in ranks:
            error = UserError(f"rank {topology.rank} failed")
            error.exit_code = 3 if topology.rank == 0 else 2
            raise error

    with pytest.raises(AgreedError, match=f"rank {ranks[0]} failed") as caught:
        on_all_ranks("part", part)
    assert caught.value.rank == ranks[0]
    assert caught.value.exit_code == (3 if ranks[0] == 0 else 2)


def test_broadcast_tensors_copies_every_tensor_bitwise(topology: Topology) -> None:
    def made(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "matrix": torch.randn(5, 7, generator=generator),
            "scalar": torch.randn((), generator=generator, dtype=torch.float64),
            "count": torch.randint(1000, (), generator=generator),
            "half": torch.randn(9, generator=generator).to(torch.bfloat16),
            "turned": torch.randn(4, 6, generator=generator).t(),
            "truth": torch.randn(5, generator=generator) > 0,
            "not a number": torch.full((2,), float("nan")),
            "empty": torch.empty(0),
        }

    tensors = made(seed=topology.rank)
    broadcast_tensors(tensors, "tensors")
    for name, expected in made(seed=0).items():
        assert tensors[name].dtype == expected.dtype
        torch.testing.assert_close(tensors[name], expected, rtol=0, atol=0, equal_nan=True)


def test_tensor_broadcast_in_chunks_arrives_unchanged(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdtrain.runtime.collectives.chunk_bytes", lambda *_: 1000)
    tensors = {"a": torch.arange(5001) * (topology.rank == 0), "b": torch.zeros(250)}
    broadcast_tensors(tensors, "pieces")
    assert torch.equal(tensors["a"], torch.arange(5001))


# (timeout in seconds, ranks, ranks per host): number of consecutive copies on a host's link.
COPIES = {(3, 2, 1): 1, (3, 4, 2): 6, (4, 16, 8): 80, (7, 64, 8): 168, (30, 1000, 8): 440}


@pytest.mark.parametrize("case", COPIES)
def test_chunk_takes_at_most_half_the_timeout_at_100_mbit(case: tuple[int, int, int]) -> None:
    seconds = chunk_bytes(*case) * 8 * COPIES[case] / 100e6
    assert 0.4 * case[0] <= seconds <= 0.5 * case[0]


def test_sum_adds_the_values_of_all_ranks(topology: Topology) -> None:
    own = torch.tensor([1.0, topology.rank], dtype=torch.float64)
    ranks = range(topology.world_size)
    assert sum_(own, "sum").tolist() == [len(ranks), sum(ranks)]


def test_topology_counts_hosts_and_ranks(topology: Topology) -> None:
    assert len(topology.hosts) == topology.world_size == topology.local_size
    assert topology.rank == topology.local_rank
    assert topology.ranks_by_host() == {topology.host: list(range(topology.world_size))}


def test_thread_waiting_for_another_rank_uses_no_processor(topology: Topology) -> None:
    sum_(torch.zeros(1), "together")
    if topology.rank == 1:
        time.sleep(1)
    begin = time.thread_time()
    sum_(torch.zeros(1), "late")
    assert time.thread_time() - begin < 0.2  # seconds; the other ranks wait for 1 s
