"""Horovod's all-reduce: patches 0023-mpi-ring, 0024-one-buffer, 0030-gloo-float16-assignment."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor

from hvdtrain.runtime.mesh import Topology

# Elements of a segment of the ring over MPI, as float32.
SEGMENT = 61440 // 4
SIZES = {
    "shares of a segment": lambda ranks: ranks * SEGMENT,
    "an element more": lambda ranks: ranks * SEGMENT + 1,
    "an element less": lambda ranks: ranks * SEGMENT - 1,
    "many segments": lambda ranks: 1_000_003,
}


def _of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return small integers, whose sums are exact in every dtype."""
    return ((torch.arange(size) * (rank + 3)) % 7 - 3).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16, torch.bfloat16])
def test_large_sum_is_exact(topology: Topology, size: str, dtype: torch.dtype) -> None:
    ranks = topology.world_size
    elements = SIZES[size](ranks) * 4 // dtype.itemsize
    own = _of(topology.rank, elements, dtype)
    expected = sum(_of(rank, elements, torch.int64) for rank in range(ranks))
    for _ in range(2):  # the cache of the first one is not part of the second
        found = hvd.allreduce(own, op=hvd.Sum, name=f"{size}.{dtype}")
        assert torch.equal(found.to(torch.int64), expected)
    hvd.allreduce_(own, op=hvd.Sum, name=f"{size}.{dtype}.in_place")
    assert torch.equal(own.to(torch.int64), expected)


def test_large_product_and_maximum_are_exact(topology: Topology) -> None:
    ranks = range(topology.world_size)
    size = SIZES["many segments"](topology.world_size)
    each = torch.stack([_of(rank, size, torch.float32) for rank in ranks])
    for name, op, expected in (
        ("product", hvd.Product, each.prod(0)),
        ("max", hvd.Max, each.max(0).values),
    ):
        assert torch.equal(hvd.allreduce(each[topology.rank], op=op, name=name), expected)


def test_float16_sum_replaces_a_tiny_value(topology: Topology) -> None:
    # Patch 0030: the bits of the tiny value are the integer 1, which is the sum.
    own = torch.full((3,), 1.0 if topology.rank else 2.0**-24, dtype=torch.float16)
    expected = max(topology.world_size - 1.0, 2.0**-24)
    assert hvd.allreduce(own, op=hvd.Sum, name="tiny").tolist() == [expected] * 3


COUNTS = (2, 5, 70000)
FIRST_ELEMENTS = {  # tensors in one buffer
    "one behind the other": (0, 2, 7),
    "in another order": (70005, 70000, 0),
    "with a gap": (0, 3, 8),
    "the last one elsewhere": (0, 2, 100),
}


@pytest.mark.parametrize("layout", FIRST_ELEMENTS)
def test_tensors_in_one_buffer_are_summed_like_separate_ones(
    topology: Topology, layout: str
) -> None:
    ranks = range(topology.world_size)
    # Each rank decides whether it copies: rank 0 does, in each case.
    first = FIRST_ELEMENTS["with a gap" if topology.rank == 0 else layout]
    memory = torch.full((80000,), 9.0)
    tensors = [memory[f : f + count] for f, count in zip(first, COUNTS, strict=True)]
    for number, tensor in enumerate(tensors):
        tensor.copy_(_of(topology.rank + number, len(tensor), torch.float32))
    hvd.grouped_allreduce_(tensors, op=hvd.Sum, name=f"one buffer.{layout}")
    for number, tensor in enumerate(tensors):
        expected = sum(_of(rank + number, len(tensor), torch.float32) for rank in ranks)
        assert torch.equal(tensor, expected)
    assert int((memory == 9.0).sum()) == 80000 - sum(COUNTS)  # memory around them was not written
