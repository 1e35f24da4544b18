"""A `python` whose ranks start immediately, forked from processes that have imported torch.

Importing torch takes most of the time of a tiny run's rank: seconds of CPU time for each rank of
each run. `python(...) -m hvdtrain.train FLAGS` behaves like `python -m hvdtrain.train FLAGS`, with
the same flags, environment, processors, directory and open files, and looks the same from outside;
warm_rank.py takes its place, forwards signals to it and ends as it ends. Differences: a rank's
parent is not its launcher, the descriptor in PMI_FD has another number, and all ranks that one
parent forks share one hash seed: on this machine the even ranks of a job, and the odd ranks; on a
host of a cluster all of its ranks. Tests of process starts, or of signals from outside, use
sys.executable.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.runtime.heartbeat import HEARTBEAT, Heartbeat

REPOSITORY = Path(__file__).resolve().parents[2]
_PARENTS = 2
_ROOM = 4096  # bytes for a rank's command line, and a quarter of the bytes for its environment
_PRELOAD = [
    *("docstring_parser", "numpy.random", "hvdtrain.process.generation", "hvdtrain.data.text"),
    *("hvdtrain.data.packed", "hvdtrain.models.sampling", "tests.support.tasks"),
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining"),
]


def python(ranks: int, preload: str = "") -> str:
    """Return the path of a command to be followed by -m MODULE, or a script, and its flags.

    Args:
        ranks: number of ranks of the job.
        preload: a module that the ranks have imported, too; each has parents of its own.
    """
    for number in range(min(_PARENTS, ranks)):
        _parent(number, preload)
    return str(_directory(preload) / "python")


def prefix(ranks: int) -> str:
    """Return the path of a command that precedes `python -m MODULE`, or `python SCRIPT`, as above.

    `hvdtrain launch` has ranks started by a Python of its own environment only, after other words.
    """
    path = _directory("") / "prefix"
    write_prefix(path, python(ranks))
    return str(path)


def write_prefix(path: Path, python: str) -> None:
    """Write the command of `prefix`; `python` is the command that has a rank forked."""
    path.write_text(f'#!/bin/sh\nshift\nexec {python} "$@"\n')
    path.chmod(0o755)


def write_command(path: Path, sockets: Path, parents: int) -> None:
    """Write the command that has a rank forked.

    Args:
        sockets: location of the parents' sockets, as the command sees them.
        parents: number of parents, to which a job's ranks are assigned by number.
    """
    rank = Path(__file__).with_name("warm_rank.py")
    words = [sys.executable, "-I", "-S", str(rank), str(sockets), str(parents)]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)


def start_parent(
    socket_path: Path,
    environment: Mapping[str, str],
    prefix: Sequence[str] = (),
    preload: str = "",
) -> subprocess.Popen[bytes]:
    """Start a parent, which ends with this process; early clients wait until it has imported torch.

    Args:
        socket_path: as this process sees it.
        prefix: a command that runs another one elsewhere.
        preload: as of `python`.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path))
        listener.listen(64)
        words = [sys.executable, "-m", "tests.support.warm", str(listener.fileno())]
        return subprocess.Popen(
            [*prefix, *words, preload + " " * _ROOM],
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            cwd=REPOSITORY,
            env={
                **environment,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "ROOM": " " * 4 * _ROOM,
            },
        )


@functools.cache
def _directory(preload: str) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_command(directory / "python", directory, _PARENTS)
    return directory


@functools.cache
def _parent(number: int, preload: str) -> subprocess.Popen[bytes]:
    return start_parent(_directory(preload) / str(number), os.environ, preload=preload)


class Parent:
    """Fork a rank for each client; kill the rank when the client disconnects."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._ranks: dict[int, tuple[int, socket.socket]] = {}  # connection -> its rank
        self._poll = select.poll()
        for descriptor in (0, listener.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        signals, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals = signals
        self._poll.register(signals, select.POLLIN)
        signal.set_wakeup_fd(signalled)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> socket.socket | None:
        """Return None when standard input is closed; in each rank, its connection."""
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
            with suppress(OSError):  # its command was killed, as poll() reports
                connection.sendall(f"{pid}\n".encode())
            self._ranks[connection.fileno()] = pid, connection
            self._poll.register(connection.fileno(), 0)  # closed
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
                with suppress(KeyError):  # it was killed before
                    self._poll.unregister(descriptor)

    def _bury(self) -> None:
        """Report the exit codes of ended ranks to their commands."""
        for descriptor, (pid, connection) in list(self._ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._ranks[descriptor]
            with suppress(KeyError, OSError):  # its command was killed, and therefore the rank
                self._poll.unregister(descriptor)
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()


def _become(connection: socket.socket) -> list[str]:
    """Adopt the state with which the replaced command was started; return its arguments."""
    head, files, _, _ = socket.recv_fds(connection, 16, 4)
    with connection, connection.makefile("rb") as stream:
        request = json.loads(stream.read(int(head)))
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    if "PMI_FD" in request["environment"]:  # its number may be in use here
        request["environment"]["PMI_FD"] = str(files[3])
    Heartbeat.__init__(HEARTBEAT)  # the parent's memory is shared by all forked ranks
    os.setsid()
    os.sched_setaffinity(0, request["processors"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    places = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [request["directory"], *places]
    if "PYTHONUNBUFFERED" in os.environ:
        for output in (sys.stdout, sys.stderr):
            output.reconfigure(write_through=True)  # type: ignore[union-attr]
    words = ["python", *request["arguments"]]
    _seem(words, [f"{name}={value}" for name, value in request["environment"].items()])
    return words[1:]


def _seem(words: Sequence[str], environment: Sequence[str]) -> None:
    """Make this process's command line and environment look like these from outside.

    Both are where the kernel put the originals, see
    https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html; they must fit.
    """
    places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    arguments, arguments_end, variables, variables_end = map(int, places)
    for strings, begin, end in (
        (words, arguments, arguments_end),
        (environment, variables, variables_end),
    ):
        content = b"".join(os.fsencode(string) + b"\0" for string in strings)
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, content, min(len(content), end - begin - 1))


def main(descriptor: str, preload: str) -> None:
    from hvdtrain.train import _load_run

    _load_run()
    for module in (*_PRELOAD, *preload.split()):
        importlib.import_module(module)
    connection = Parent(socket.socket(fileno=int(descriptor))).serve()
    if connection is None:
        return
    first, *rest = _become(connection)
    if first != "-m":
        sys.argv = [first, *rest]
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")
        return
    module, *sys.argv[1:] = rest
    sys.modules.pop(module, None)  # otherwise runpy warns
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
