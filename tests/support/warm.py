"""Processes that have imported what a rank imports, and fork the ranks of tests.

Importing torch is most of what a rank of a tiny run does: seconds of a core, for each rank of
each run. A rank is started here as by `python -m hvdtrain.train`, with the flags, environment,
folder and open files of the command in its place (warm_rank.py), which passes signals on to it
and ends as it ends. Other than there, ranks from one parent have one seed of hashes, so that the
ranks of even and of odd number have two parents; and a rank's own parent is not its launcher.
What judges starts, processes or the launchers' signals starts them as people do.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_RANK = [sys.executable, "-I", "-S", str(Path(__file__).with_name("warm_rank.py"))]
_MODULE = "hvdtrain.train"
_PRELOAD = ["hvdtrain.tasks.language_model", "hvdtrain.run.generation", "tests.support.tasks"]


def command(alone: bool, more: tuple[str, ...] = ()) -> list[str]:
    """The command of a rank, whose flags follow.

    Args:
        alone: there is no other rank.
        more: modules to import beside those that every rank does.
    """
    return [*_RANK, ":".join(_parent(number, more)[0] for number in range(1 if alone else 2))]


@functools.cache
def _parent(number: int, more: tuple[str, ...]) -> tuple[str, subprocess.Popen[bytes]]:
    """Starts one; where it listens. Who comes before it has imported waits."""
    path = f"{tempfile.mkdtemp(prefix='warm-')}/{number}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", path, str(listener.fileno()), *more],
            stdin=subprocess.PIPE,  # closed when this process ends, however it does
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
    return path, process


class Parent:
    """Forks a rank for each who connects; kills it when they go."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._ranks: dict[int, tuple[int, socket.socket]] = {}  # by connection: its rank
        self._poll = select.poll()
        for descriptor in (0, listener.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        signals, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals = signals
        self._poll.register(signals, select.POLLIN)
        signal.set_wakeup_fd(signalled)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> socket.socket | None:
        """None when standard input is closed; in a rank, once for each, its connection."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == 0:
                    self._kill(*self._ranks)
                    return None
                if descriptor == self._signals:
                    os.read(descriptor, 512)
                    self._bury()
                elif descriptor == self._listener.fileno():
                    connection, _ = self._listener.accept()
                    if self._fork(connection) == 0:
                        return connection
                else:
                    self._kill(descriptor)

    def _fork(self, connection: socket.socket) -> int:
        pid = os.fork()
        if pid:
            connection.sendall(f"{pid}\n".encode())
            self._ranks[connection.fileno()] = pid, connection
            self._poll.register(connection.fileno(), 0)  # nothing but that its end is closed
            return pid
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._listener.close()
        for _, other in self._ranks.values():
            other.close()
        return 0

    def _kill(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            if descriptor in self._ranks:
                os.kill(self._ranks[descriptor][0], signal.SIGKILL)
                self._poll.unregister(descriptor)

    def _bury(self) -> None:
        """Tells the commands of ranks that ended how."""
        for descriptor, (pid, connection) in list(self._ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._ranks[descriptor]
            try:
                self._poll.unregister(descriptor)
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            except (KeyError, OSError):
                pass  # its command was killed, and it for that
            connection.close()


def _become(connection: socket.socket) -> None:
    """Takes over what the command in this one's place was started with."""
    head, files, _, _ = socket.recv_fds(connection, 16, 3)
    with connection, connection.makefile("rb") as stream:
        request = json.loads(stream.read(int(head)))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    places = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [request["folder"], *places]
    sys.argv[1:] = request["arguments"]
    if "PYTHONUNBUFFERED" in os.environ:
        for output in (sys.stdout, sys.stderr):
            output.reconfigure(write_through=True)  # type: ignore[union-attr]


def main(path: str, descriptor: str, *more: str) -> None:
    from hvdtrain.train import _load_run

    _load_run()
    for module in (*_PRELOAD, *more):
        importlib.import_module(module)
    connection = Parent(socket.socket(fileno=int(descriptor))).serve()
    if connection is None:
        shutil.rmtree(Path(path).parent)
        return
    _become(connection)
    del sys.modules[_MODULE]
    runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
