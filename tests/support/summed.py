"""One rank: all-reduces of every kind, compared with the expected results.

python -m tests.support.summed
"""

from __future__ import annotations

import horovod.torch as hvd
import torch

from hvdtrain.runtime import environment
from hvdtrain.runtime.init import initialize

# One element, fewer elements than ranks of a host, an odd number, and several chunks (patch 0017).
SIZES = (1, 3, 1001, 600_011)
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def main() -> None:
    environment.prepare(hierarchical=True)
    topology = initialize()
    ranks = range(topology.world_size)
    for size in SIZES:
        for dtype in TYPES:
            # Small integers, whose sums and products are exact in every type.
            of_ranks = torch.stack([(torch.arange(size) + 3 * r) % 7 - 3 for r in ranks])
            own = of_ranks[topology.rank].to(dtype)
            for op, expected in {
                hvd.Sum: of_ranks.sum(0),
                hvd.Min: of_ranks.amin(0),
                hvd.Max: of_ranks.amax(0),
                hvd.Product: of_ranks.prod(0),
            }.items():
                got = hvd.allreduce(own, op=op, name=f"{size}.{dtype}.{op}")
                assert torch.equal(got.long(), expected), (size, dtype, op)
            several = hvd.grouped_allreduce([own, own + 1], op=hvd.Sum, name=f"{size}.{dtype}")
            assert torch.equal(several[1].long(), of_ranks.sum(0) + topology.world_size)
    # The ranks of a host cancel each other. In a ring through all ranks, the ones would be lost in
    # float32 wherever they are added to 1e8 first.
    value = torch.full((600_011,), (1e8, -1e8)[topology.rank] if topology.rank < 2 else 1.0)
    assert set(hvd.allreduce(value, op=hvd.Sum, name="hosts").tolist()) == {2.0}
    hvd.barrier()
    if topology.rank == 0:
        print(f"right on {topology.world_size} ranks")


if __name__ == "__main__":
    main()
