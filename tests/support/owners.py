"""Tasks for the question whose a run is."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor, nn

from hvdtrain.runtime.environment import launched_rank
from tests.support.tasks import Paced


class NoLocks(Paced):
    """Paced, on a file system without flock: a Lustre that is mounted without it says ENOSYS.

    A real one cannot be had where tests run, so the call itself fails.
    """

    def __init__(self) -> None:
        super().__init__()

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        fcntl.flock = fail


class LendsLock(Paced):
    """Paced; process 0 hands the lock of its run to the listener at HVDTRAIN_TEST_LOCKS.

    So it outlives the process: a descriptor that is passed on shares the lock. A helper process
    that held it would be ended with its rank.
    """

    def __init__(self) -> None:
        super().__init__()
        own = psutil.Process().environ()  # as it was at the start
        self._lent = launched_rank(own) != 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if not self._lent:
            self._lent = True
            with socket.socket(socket.AF_UNIX) as listener:
                listener.connect(os.environ["HVDTRAIN_TEST_LOCKS"])
                socket.send_fds(listener, [b"."], _locks())
        return super().loss(model, batch)


def _locks() -> list[int]:
    """Descriptors of files named .lock that this process has open."""
    found = []
    for file in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}").endswith("/.lock"):
                found.append(file)
    return found


class BorrowedLocks:
    """Keeps each lock that a LendsLock hands to `address`, until `close`.

    Args:
        folder: that all hosts see, with a short path, as it becomes that of a socket.
    """

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / f"locks-{secrets.token_hex(4)}")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self.held: list[int] = []
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        with suppress(OSError):  # closed
            while True:
                rank, _ = self._listener.accept()
                with rank:
                    self.held += socket.recv_fds(rank, 1, 1)[1]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for file in self.held:
            os.close(file)
