"""One rank that compares all-reduces with sums in the order of the ranks, for several ranks.

`python -m tests.support.shared_sums` under a launcher; prints the number of memories that the rank
shares, or raises.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import Tensor

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
)
# Bytes: one and two elements, the largest buffer that each rank sums wholly, less and more than a
# chunk, and more than the memory holds for a rank.
SIZES = (0, 8, 1000, 4096, 5000, 1 << 20, 9 << 20)


def mappings() -> list[str]:
    """Return this process's mappings of shared memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:horovod" in line]


def descriptors() -> list[str]:
    """Return this process's descriptors of shared memory."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # that of listdir
            continue
    return [link for link in links if "/memfd:horovod" in link]


def _values(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype)
    most = torch.iinfo(dtype).max // 8
    return torch.randint(0, most, (elements,), generator=generator, dtype=dtype)


def _sum(rank: int, ranks: int, elements: int, dtype: torch.dtype, name: str) -> None:
    each = [_values(other, elements, dtype) for other in range(ranks)]
    found = hvd.allreduce(each[rank], op=hvd.Sum, name=name)
    expected = functools.reduce(torch.add, each)
    assert torch.equal(found, expected), (name, int((found != expected).sum()))


def check_all_sizes(rank: int, ranks: int) -> None:
    for dtype in DTYPES:
        for size in SIZES:
            elements = size // dtype.itemsize + 1
            _sum(rank, ranks, elements, dtype, f"shared.{dtype}.{size}")


def check_many(rank: int, ranks: int) -> None:
    tensors = [torch.full((1 + number % 7,), float(rank + number)) for number in range(300)]
    handles = [
        hvd.allreduce_async(tensor, op=hvd.Sum, name=f"shared.small.{number}")
        for number, tensor in enumerate(tensors)
    ]
    for number, handle in enumerate(handles):
        expected = float(sum(range(ranks)) + ranks * number)
        assert torch.equal(hvd.synchronize(handle), torch.full((1 + number % 7,), expected))


def _check_process_sets(rank: int, ranks: int) -> None:
    """Each of two sets has half of the ranks; the last rank has a set of its own."""
    some = [list(range(ranks // 2)), list(range(ranks // 2, ranks))]
    for members in some:
        made = hvd.add_process_set(members)
        if rank in members:
            own = torch.full((100_000,), float(rank))
            for length in (5, len(own)):
                found = hvd.allreduce(own[:length], op=hvd.Sum, process_set=made, name="set")
                assert torch.equal(found, torch.full((length,), float(sum(members))))


def main() -> int:
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    check_all_sizes(rank, ranks)
    check_many(rank, ranks)
    _check_process_sets(rank, ranks)
    print(f"rank {rank} shares {len(mappings())}", flush=True)
    hvd.barrier()  # a rank that shuts down ends the others' exchanges, and frees their memory
    hvd.shutdown()
    assert not mappings()
    return 0


if __name__ == "__main__":
    sys.exit(main())
