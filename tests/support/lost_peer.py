"""Three ranks that exchange; the last one ends itself, by a signal, in the midst of it.

    python -m tests.support.lost_peer SIGNAL

under a launcher. The others print the seconds after which their exchange failed. With SIGSTOP the
last rank only stops.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

SIZE = 1 << 20  # 4 MiB: the exchange takes nearly all the time
STEPS_SECONDS = 0.5


def main() -> None:
    # horovodrun ends the other ranks as soon as one has ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    number = getattr(signal, sys.argv[1])
    hvd.init()
    tensor = torch.zeros(SIZE)
    hvd.allreduce(tensor, name="warm")
    at = hvd.broadcast(torch.tensor(time.time() + STEPS_SECONDS, dtype=torch.float64), 0).item()
    last_pid = int(hvd.allgather(torch.tensor([os.getpid()]))[-1])
    last = os.getpid() == last_pid
    if last:
        end = threading.Timer(at - time.time(), os.kill, (os.getpid(), number))
        end.daemon = True
        end.start()
    try:
        while True:
            hvd.allreduce(tensor, name="large")
    except HorovodInternalError:
        if not last:
            print(f"failed after {time.time() - at:.2f} s", flush=True)
            with suppress(ProcessLookupError):
                os.kill(last_pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
