"""Horovod's all-reduce and its optimizer: patches 0012, 0019, 0023, 0024, 0029 and 0030."""

from __future__ import annotations

import os
import re
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor

from hvdtrain.runtime.init import controller
from hvdtrain.runtime.mesh import Topology

MIB = 2**20
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


def test_contiguous_tensors_are_not_copied_into_a_buffer(topology: Topology) -> None:
    if controller() != "gloo":
        pytest.skip("MPI allocates memory of its own")
    tensors = list(torch.zeros(4, 6 * MIB // 4))
    before = _anonymous_bytes()
    hvd.grouped_allreduce_(tensors, op=hvd.Max, name="resident")
    # A copy would make 24 MiB of the buffer's pages resident.
    assert _anonymous_bytes() - before < 12 * MIB


def _anonymous_bytes() -> int:
    """Resident memory of this process, without files and shared memory."""
    (line,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


@pytest.mark.skipif("f16c" not in Path("/proc/cpuinfo").read_text(), reason="no float16 processor")
def test_gloo_sums_float16_with_instructions_of_the_processor(topology: Topology) -> None:
    if controller() != "gloo" or os.environ.get("HOROVOD_SHARED_MEMORY") != "0":
        pytest.skip("MPI and shared memory sum float16 with other code")
    # Software keeps one NaN, 0x7fff; the processor keeps the NaN that it got.
    nan = torch.full((64 * topology.world_size,), 0x7E00, dtype=torch.int16).view(torch.float16)
    own = nan if topology.rank == 0 else torch.ones_like(nan)
    found = hvd.allreduce(own, op=hvd.Sum, name="not a number")
    assert set(found.view(torch.int16).tolist()) == {0x7E00}


@pytest.mark.parametrize("forget", ["abandon_step", "load_state_dict"])
def test_step_after_an_interrupted_one_reduces_complete_groups(
    topology: Topology, forget: str
) -> None:
    layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    named = [(f"{forget}.{number}", layer.weight) for number, layer in enumerate(layers)]
    plain = torch.optim.SGD([weight for _, weight in named], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, num_groups=1)
    layers[0](torch.ones(1)).sum().backward()  # interrupted: the other gradient is missing
    if forget == "abandon_step":
        optimizer.abandon_step()
    else:
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    value = torch.tensor([topology.rank + 1.0])
    sum(layer(value) for layer in layers).sum().backward()
    optimizer.synchronize()
    mean = sum(rank + 1.0 for rank in range(topology.world_size)) / topology.world_size
    assert [weight.grad.item() for _, weight in named] == [mean, mean]


def test_hooks_of_the_optimizer_do_not_hash_whole_groups(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = [(f"hashed.{number}", torch.nn.Parameter(torch.ones(1))) for number in range(20)]
    plain = torch.optim.SGD([weight for _, weight in named], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, num_groups=1)
    loss = sum(weight for _, weight in named)
    hashed = []
    original = torch.Tensor.__hash__
    monkeypatch.setattr(torch.Tensor, "__hash__", lambda t: hashed.append(1) or original(t))
    loss.backward()
    monkeypatch.undo()
    optimizer.synchronize()
    assert len(hashed) < 20 * len(named)  # a hook that hashes its group adds 20 for each look-up
