"""A rank's handle of its watchdog."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from hvdtrain.log import logger

_RESTART_SECONDS = (0.5, 60.0)  # after a watchdog's first end; longest pause


class KeptWatchdog:
    """A watchdog that is restarted whenever it ends, with a warning the first time.

    Args:
        start: starts a watchdog.
    """

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._start = start
        self._stacks: Path | None = None
        self._lock = threading.Lock()
        self._process = start()
        os.register_at_fork(after_in_child=partial(faulthandler.unregister, signal.SIGQUIT))
        threading.Thread(target=self._keep, name="watchdog", daemon=True).start()

    def write_to(self, stacks: Path) -> None:
        """Set the file for stacks in the watchdog and in the rank's own fault handler.

        If the file cannot be written, training continues without stacks.
        """
        with self._lock:
            self._stacks = stacks
            self._send_path()
        with suppress(OSError):
            file = open(stacks, "a")  # noqa: SIM115 - as long as the process lives
            faulthandler.register(signal.SIGQUIT, file=file, all_threads=True)

    def _send_path(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has died: its successor receives the path
            self._process.stdin.write(f"{self._stacks}\n".encode())
            self._process.stdin.flush()

    def _keep(self) -> None:
        pause = _RESTART_SECONDS[0]
        said = False
        while True:
            code = self._process.wait()
            if not said:
                said = True
                logger.warning("this rank's watchdog ended (%s); it is started again", code)
            time.sleep(pause)
            pause = min(2 * pause, _RESTART_SECONDS[1])
            with self._lock, suppress(OSError):  # currently no memory for it
                self._process = self._start()
                if self._stacks is not None:
                    self._send_path()
