"""A python whose ranks start at once: forked from processes that have imported torch already.

Importing torch is most of what a rank of a tiny run does: seconds of a core, for each rank of
each run. `python(...) -m hvdtrain.train FLAGS` is `python -m hvdtrain.train FLAGS` with the same
flags, environment, processors, directory and open files, and looks like it from outside;
warm_rank.py stands in its place, passes signals on to it and ends as it ends. What differs: a
rank's parent is not its launcher, and all that one parent forks share one seed of hashes: on this
machine the ranks of even number of a job, and those of odd number; on a host of a cluster all of
its ranks. What judges starts, or signals from outside, takes sys.executable.
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
_ROOM = 4096  # bytes; of a rank's command line, and a quarter of those of its environment
_PRELOAD = [
    *("docstring_parser", "numpy.random", "hvdtrain.run.generation", "hvdtrain.data.text"),
    *("hvdtrain.data.packed", "hvdtrain.models.sampling", "tests.support.tasks"),
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining"),
]


def python(ranks: int) -> str:
    """The path of a command that is to be followed by -m, the name of a module and its flags.

    Args:
        ranks: of the job.
    """
    for number in range(min(_PARENTS, ranks)):
        _parent(number)
    return str(_directory() / "python")


def write_command(path: Path, sockets: Path, parents: int) -> None:
    """Writes the command that has a rank forked.

    Args:
        sockets: where those of the parents are, as the command finds them.
        parents: among which the ranks of a job are assigned by their numbers.
    """
    rank = Path(__file__).with_name("warm_rank.py")
    words = [sys.executable, "-I", "-S", str(rank), str(sockets), str(parents)]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)


def start_parent(
    socket_path: Path, environment: Mapping[str, str], prefix: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Starts one, which ends with this process. Who comes before it has imported waits.

    Args:
        socket_path: as this process finds it.
        prefix: a command that runs another one elsewhere.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path))
        listener.listen(64)
        words = [sys.executable, "-m", "tests.support.warm", str(listener.fileno())]
        return subprocess.Popen(
            [*prefix, *words, " " * _ROOM],
            stdin=subprocess.PIPE,  # closed with this process, however it ends
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
def _directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_command(directory / "python", directory, _PARENTS)
    return directory


@functools.cache
def _parent(number: int) -> subprocess.Popen[bytes]:
    return start_parent(_directory() / str(number), os.environ)


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
            with suppress(OSError):  # its command was killed: poll() tells so
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
                with suppress(KeyError):  # it was killed before
                    self._poll.unregister(descriptor)

    def _bury(self) -> None:
        """Tells the commands of ranks that ended how."""
        for descriptor, (pid, connection) in list(self._ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._ranks[descriptor]
            with suppress(KeyError, OSError):  # its command was killed, and it for that
                self._poll.unregister(descriptor)
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()


def _become(connection: socket.socket) -> list[str]:
    """Takes over what the command in this one's place was started with; returns its arguments."""
    head, files, _, _ = socket.recv_fds(connection, 16, 3)
    with connection, connection.makefile("rb") as stream:
        request = json.loads(stream.read(int(head)))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    Heartbeat.__init__(HEARTBEAT)  # the parent's memory is shared by all that it forks
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
    """Has this process's command line and environment read like these from outside.

    Both lie where the kernel put those that the process was started with, see
    https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html; there has to be room.
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


def main(descriptor: str) -> None:
    from hvdtrain.train import _load_run

    _load_run()
    for module in _PRELOAD:
        importlib.import_module(module)
    connection = Parent(socket.socket(fileno=int(descriptor))).serve()
    if connection is None:
        return
    _, module, *sys.argv[1:] = _become(connection)
    sys.modules.pop(module, None)  # runpy warns of it
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1])
