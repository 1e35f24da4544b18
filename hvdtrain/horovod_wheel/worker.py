"""One rank of `hvdtrain horovod check`: all-reduce a tensor and compare the sum."""

from __future__ import annotations

import sys


def main() -> int:
    """Print `rank R of N: sum ok` and return 0, or print the error and return 1."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ours = torch.arange(1000, dtype=torch.float32) + rank
    total = hvd.allreduce(ours, op=hvd.Sum)
    expected = torch.arange(1000, dtype=torch.float32) * size + size * (size - 1) / 2
    if size < 2:
        print(f"error: rank {rank} is the only rank: Horovod does not recognize the launcher")
    elif not torch.equal(total, expected):
        print(f"error: rank {rank} of {size}: the sum is wrong: {total[:3]} for {expected[:3]}")
    else:
        print(f"rank {rank} of {size}: sum ok", flush=True)
        hvd.shutdown()
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
