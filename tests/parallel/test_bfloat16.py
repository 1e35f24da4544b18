"""torch.bfloat16 in Horovod's own collectives, which patch 0018-bfloat16 adds."""

from __future__ import annotations

from functools import reduce

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor

from hvdtrain.runtime.mesh import Topology

ODD_SIZES = (0, 1, 7, 1001)
# Two ranks have one order of addition, more ranks have several.
REDUCTIONS = {
    "sum": (hvd.Sum, torch.add),
    "product": (hvd.Product, torch.mul),
    "min": (hvd.Min, torch.minimum),
    "max": (hvd.Max, torch.maximum),
}


def _numbers(rank: int) -> Tensor:
    """Return (65536,): every bfloat16 value, with subnormals, infinities and NaN, in a different
    order on each rank."""
    patterns = torch.arange(1 << 16)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(rank))
    return patterns[order].to(torch.uint16).view(torch.bfloat16)


def _of(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).bfloat16()


def _rounded(found: Tensor, expected: Tensor) -> None:
    """Return where `expected`, float32, is rounded once to nearest even, as torch does it."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_equal_rounded_float32(topology: Topology, name: str) -> None:
    if topology.world_size > 2:
        pytest.skip("more than two ranks add in an order that depends on the algorithm")
    op, combine = REDUCTIONS[name]
    each = [_numbers(rank).float() for rank in range(topology.world_size)]
    expected = reduce(combine, each)
    found = hvd.allreduce(_numbers(topology.rank), op=op, name=f"numbers.{name}")
    if name in ("min", "max"):  # for a NaN and a number either may result
        comparable = ~expected.isnan()
        found, expected = found[comparable], expected[comparable]
    _rounded(found, expected)


@pytest.mark.parametrize("size", ODD_SIZES)
def test_sums_of_odd_sizes_equal_rounded_float32(topology: Topology, size: int) -> None:
    every = torch.stack([_of(rank, size) for rank in range(topology.world_size)]).float()
    own = _of(topology.rank, size)
    # More ranks round each partial sum, of magnitude below 16: by at most 2**-4 per addition.
    tolerance = {"rtol": 0.0, "atol": 2.0**-4 * max(0, topology.world_size - 2)}
    for op, expected in ((hvd.Sum, every.sum(0)), (hvd.Average, every.mean(0))):
        found = hvd.allreduce(own, op=op, name=f"odd.{op}")
        torch.testing.assert_close(found, expected.bfloat16(), **tolerance)
    scaled = hvd.allreduce(own, op=hvd.Sum, name="odd.scaled", prescale_factor=0.5)
    torch.testing.assert_close(scaled, (0.5 * every.sum(0)).bfloat16(), **tolerance)
    grouped = hvd.grouped_allreduce([own, 2 * own], op=hvd.Sum, name="odd.grouped")
    for factor, found in enumerate(grouped, start=1):
        torch.testing.assert_close(found, (factor * every.sum(0)).bfloat16(), **tolerance)


def test_allgather_broadcast_and_alltoall_are_bitwise_exact(topology: Topology) -> None:
    ranks = range(topology.world_size)
    gathered = hvd.allgather(_of(topology.rank, 2 * topology.rank + 1, 3), name="gather")
    assert torch.equal(gathered, torch.cat([_of(rank, 2 * rank + 1, 3) for rank in ranks]))
    for root in ranks:
        assert torch.equal(hvd.broadcast(_of(topology.rank, 5), root, name="cast"), _of(root, 5))
    # Rank r sends r + to + 1 rows to rank `to`.
    sizes = [[rank + to + 1 for to in ranks] for rank in ranks]
    parts = [_of(rank, sum(sizes[rank]), 3).split(sizes[rank]) for rank in ranks]
    own = torch.cat(parts[topology.rank])
    dealt, splits = hvd.alltoall(own, sizes[topology.rank], name="deal")
    assert splits.tolist() == [row[topology.rank] for row in sizes]
    assert torch.equal(dealt, torch.cat([theirs[topology.rank] for theirs in parts]))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_reducescatter_gives_each_rank_its_shard_of_the_sum(topology: Topology, rows: int) -> None:
    every = torch.stack([_of(rank, rows, 3) for rank in range(topology.world_size)]).float()
    found = hvd.reducescatter(_of(topology.rank, rows, 3), op=hvd.Sum, name="part")
    mine = every.sum(0).tensor_split(topology.world_size)[topology.rank]
    atol = 0.02 * (topology.world_size > 2)
    torch.testing.assert_close(found, mine.bfloat16(), rtol=0, atol=atol)
