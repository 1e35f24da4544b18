"""A process that prints how it was started, waits, and exits with 7 at SIGUSR1."""

from __future__ import annotations

import os
import signal
import sys
import time

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
    print(sys.argv[1:], os.environ["HVDTRAIN_TEST_WORD"], os.getcwd())
    print(f"rank: {os.getpid()}", flush=True)
    time.sleep(60)
