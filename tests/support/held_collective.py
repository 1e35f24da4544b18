"""A job of two ranks in which rank 1 does not take part in an all-reduce, for the stall check."""

from __future__ import annotations

import sys
import time

import horovod.torch as hvd
import torch


def main() -> None:
    hvd.init()
    hvd.allreduce(torch.ones(1), name="together")
    if hvd.rank() == 1:
        time.sleep(30)
        sys.exit("rank 1 was never missed")
    hvd.allreduce(torch.ones(1), name="alone")


if __name__ == "__main__":
    main()
