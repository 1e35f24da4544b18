"""One of seven ranks that compares small all-reduces with sums of pairs, or raises.

`python -m tests.support.small_sums` under horovodrun.
"""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch

# In pairs (0 + 1) + (2 + 3) the sum is 1, as 2**53 + 1 rounds to 2**53. One rank after another,
# from any rank on, gives 0 or 2.
VALUES = (2.0**53, 1.0, 1.0, -(2.0**53), 0.0, 0.0, 0.0)
LARGEST = 16 << 10  # bytes


def main() -> int:
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    assert ranks == len(VALUES)
    own = torch.full((100,), VALUES[rank], dtype=torch.float64)
    assert hvd.allreduce(own, op=hvd.Sum, name="pairs").eq(1).all()
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.float16):
        for elements in (1, 2, LARGEST // dtype.itemsize, LARGEST // dtype.itemsize + 1):
            own = (torch.arange(elements) % 5 + rank).to(dtype)
            expected = (torch.arange(elements) % 5 * ranks + sum(range(ranks))).to(dtype)
            found = hvd.allreduce(own, op=hvd.Sum, name=f"small.{dtype}.{elements}")
            assert torch.equal(found, expected), (dtype, elements)
    print(f"rank {rank} agrees", flush=True)
    hvd.barrier()
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
