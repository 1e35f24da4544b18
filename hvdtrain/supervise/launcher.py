"""Launcher process of a supervisor: it ends with the supervisor, and its last lines are kept."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

from hvdtrain.errors import UserError

_TAIL_BYTES = 4096
_TERM_SECONDS = 5.0
_KILL_SECONDS = 5.0


class Launcher:
    """A running mpirun or horovodrun.

    However this process ends, the kernel then sends SIGTERM to the launcher, which ends its ranks.
    Ctrl-C at the terminal reaches only this process, which decides what to do.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], directory: str) -> None:
        """Start the launcher in a directory, or in / if that does not exist any more.

        Raises:
            UserError: the launcher is not installed.
        """
        if shutil.which(argv[0]) is None:
            raise UserError(f"{argv[0]} is not found: install it, or add it to PATH")
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", "--", *argv],
            env=dict(env),
            cwd=directory if os.path.isdir(directory) else "/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._tail = b""
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._forward, args=streams, daemon=True)
            for streams in (
                (self._process.stdout, sys.stdout),
                (self._process.stderr, sys.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    def poll(self) -> int | None:
        """Return the exit code, or 128 + the number of the signal that ended it; None: it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        """End it by SIGTERM, so that it ends its ranks on all hosts; kill it after a limit."""
        self._process.terminate()
        try:
            self._process.wait(_TERM_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill it at once; the caller must end any ranks that are left."""
        self._process.kill()
        # Do not wait for a process that the kernel cannot end now.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)

    def last_lines(self, most: int = 15) -> list[str]:
        """Return the end of its error output; call it after the launcher has ended."""
        for reader in self._readers:
            reader.join(1.0)  # a process that is left may keep the pipe open
        return self._tail.decode(errors="replace").splitlines()[-most:]

    def _forward(self, source: IO[bytes], target: TextIO) -> None:
        with source as pipe:
            while block := os.read(pipe.fileno(), 1 << 16):
                self._pass_on(block, target)

    def _pass_on(self, output: bytes, target: TextIO) -> None:
        if target is sys.stderr:
            self._tail = (self._tail + output)[-_TAIL_BYTES:]
        with contextlib.suppress(OSError):  # the reader of this output is gone: training continues
            if not hasattr(target, "buffer"):  # in a notebook
                target.write(output.decode(errors="replace"))
                return
            target.buffer.write(output)
            target.buffer.flush()
