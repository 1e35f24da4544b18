"""Two ranks that exchange large tensors; rank 0 freezes rank 1 during an exchange, then aborts.

    horovodrun --gloo -np 2 python -m tests.support.aborted

Rank 0 prints the seconds after which its exchange failed; hvd.abort() was called after 1 s.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

SIZE = 1 << 26  # 256 MiB: the transfer takes nearly all the time


def _freeze_then_abort(pid: int, frozen: list[float]) -> None:
    time.sleep(1.0)
    os.kill(pid, signal.SIGSTOP)
    frozen.append(time.monotonic())
    time.sleep(1.0)
    hvd.abort()


def main() -> None:
    hvd.init()
    other = int(hvd.allgather(torch.tensor([os.getpid()]))[-1])
    tensor, frozen = torch.zeros(SIZE), list[float]()
    hvd.allreduce(tensor, name="warm")
    if hvd.rank() == 0:
        threading.Thread(target=_freeze_then_abort, args=(other, frozen), daemon=True).start()
    try:
        while True:
            hvd.allreduce(tensor, name="large")
    except HorovodInternalError:
        print(f"failed after {time.monotonic() - frozen[0]:.2f} s", flush=True)
    os.kill(other, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
