"""One of three ranks that sums tensors begun together, compared with one sum after another.

`python -m tests.support.sums_together` under a launcher, without shared memory: only a ring adds in
an order that depends on the position in a buffer.
"""

from __future__ import annotations

import sys

import torch

from hvdtrain.runtime import environment
from hvdtrain.runtime.collectives import begin_sum, completed
from hvdtrain.runtime.horovod import hvd
from hvdtrain.runtime.init import initialize

TENSORS, ELEMENTS = 8, 10_000  # more than the 16 KiB that are summed in pairs of ranks
BUSY = 4 << 20


def main() -> int:
    environment.prepare()
    topology = initialize()
    generator = torch.Generator().manual_seed(topology.rank)
    own = [torch.randn(ELEMENTS, generator=generator) for _ in range(TENSORS)]
    expected = [tensor.clone() for tensor in own]
    for number, tensor in enumerate(expected):
        completed(begin_sum(tensor, f"single.{number}"))
    # Ranks are ready to sum all of the others when this one is summed.
    busy = begin_sum(torch.ones(BUSY), "busy")
    handles = [begin_sum(tensor, f"together.{number}") for number, tensor in enumerate(own)]
    for handle in (busy, *handles):
        completed(handle)
    differing = [n for n in range(TENSORS) if not torch.equal(own[n], expected[n])]
    print(f"rank {topology.rank}: {differing} differ", flush=True)
    hvd.barrier()
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
