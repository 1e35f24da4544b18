"""Tasks for the question whose a run is."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from typing import Any

import psutil
from torch import Tensor, nn

from hvdtrain.runtime.environment import launched_rank
from tests.support.tasks import Paced

_HELPER_SECONDS = "60"


class NoLocks(Paced):
    """Paced, on a file system without flock: a Lustre that is mounted without it says ENOSYS.

    A real one cannot be had where tests run, so the call itself fails.
    """

    def __init__(self) -> None:
        super().__init__()

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        fcntl.flock = fail


class WithHelper(Paced):
    """Paced; process 0 has a helper that holds what is open, and outlives it."""

    def __init__(self) -> None:
        super().__init__()
        own = psutil.Process().environ()  # as it was at the start
        self._alone = launched_rank(own) != 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if not self._alone:
            self._alone = True
            if os.fork() == 0:
                _become_helper()
        return super().loss(model, batch)


def _become_helper() -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # nobody waits for the end of its output
        os.dup2(null, stream)
    for file in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}").endswith("/.lock"):
                os.set_inheritable(file, True)
            elif file > 2:  # nor for that of its connections
                os.close(file)
    # Without the environment by which `hvdtrain launch` would find it.
    os.execve("/bin/sleep", ["sleep", _HELPER_SECONDS], {})
