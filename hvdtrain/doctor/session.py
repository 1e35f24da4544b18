"""Session with a host: its agent, started once over ssh, and all requests to it."""

from __future__ import annotations

import errno
import json
import os
import queue
import resource
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from hvdtrain.doctor.agent import MARK
from hvdtrain.errors import UserError
from hvdtrain.launch.mpi import SSH_OPTIONS

T = TypeVar("T")

LOGIN_SECONDS = 25.0  # ssh itself gives up after 3
_PYTHON, _SSH_PYTHON = "python", "ssh-python"
_NO_DIRECTORY, _NO_PYTHON = "no-directory", "no-python"
_AGENT = [sys.executable, "-m", "hvdtrain.doctor.agent"]


class SilentError(Exception):
    """A host does not answer, or reports an error; the message says how."""


@dataclass
class Login:
    """Result of the login to a host.

    Args:
        python: path of `python` on the host with this process's PATH; "" if there is none.
        ssh_python: path of `python` on the host with the PATH of a command over ssh.
        directory: whether this working directory exists on the host.
        interpreter: whether this Python exists on the host, under the same path.
        output: the last lines of ssh or Python, if no agent answered.
    """

    python: str = ""
    ssh_python: str = ""
    directory: bool = True
    interpreter: bool = True
    output: list[str] = field(default_factory=list)


class HostSession:
    """The agent of one host, running until `close`.

    Args:
        name: name of the host for ssh.
        here: whether it is this host, which needs no ssh.

    Attributes:
        login: result of the login.
        failures: requests without an answer, and why; their results are unknown.
    """

    def __init__(self, name: str, here: bool) -> None:
        self.name, self.here = name, here
        self.login = Login()
        self.failures: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the agent
        argv = _AGENT if here else ["ssh", *SSH_OPTIONS, name, _remote_command()]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output, text=True
        )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def start(self) -> bool:
        """Wait for the agent's first answer; `login` says why there is none."""
        deadline = time.monotonic() + LOGIN_SECONDS
        try:
            while True:
                word = self._next(deadline - time.monotonic())
                if word.startswith("{"):
                    break
                self._note(word)
        except SilentError as error:
            self.login.output = self._last_lines() or [str(error)]
            self.close()  # a late line would be mistaken for an answer
        return not self.login.output

    def ask(self, do: str, limit: float, **arguments: Any) -> Any:
        """Return the agent's answer to a request; see agent.py.

        Args:
            limit: seconds.

        Raises:
            SilentError: there is no answer within `limit`, or the agent reports an error.
        """
        try:
            return self._ask(do, limit, arguments)
        except SilentError as error:
            self.failures.append(f"{do}: {error}")
            raise

    def _ask(self, do: str, limit: float, arguments: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SilentError(f"its agent ended: {self._last_line() or error}") from None
        try:
            output = json.loads(self._next(limit))
        except SilentError:
            self.close()  # a late answer would be mistaken for the next one
            raise
        if "error" in output:
            raise SilentError(output["error"])
        return output["answer"]

    def close(self) -> None:
        with suppress(OSError):
            self._process.kill()
            self._process.wait(5)

    def _note(self, word: str) -> None:
        kind, _, rest = word.partition(" ")
        if kind == _PYTHON:
            self.login.python = rest
        elif kind == _SSH_PYTHON:
            self.login.ssh_python = rest
        elif kind == _NO_DIRECTORY:
            self.login.directory = False
        elif kind == _NO_PYTHON:
            self.login.interpreter = False

    def _next(self, seconds: float) -> str:
        """Return the next line of the agent, or of the shell before it."""
        try:
            line = self._lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise SilentError("no response in time") from None
        if line is None:
            raise SilentError(self._last_line() or "the connection ended")
        return line

    def _read(self, source: IO[str]) -> None:
        with suppress(OSError, ValueError):
            for line in source:
                # The output of a ~/.bashrc comes before it, in separate lines or on the same line.
                _, mark, word = line.partition(MARK)
                if mark:
                    self._lines.put(word.rstrip("\n"))
        self._lines.put(None)

    def _last_line(self) -> str:
        return next(reversed(self._last_lines()), "")

    def _last_lines(self) -> list[str]:
        """The last lines of its error output so far."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 4096))
        lines = self._output.read().decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip(" @\r")]


@contextmanager
def opened(own: str, others: Sequence[str]) -> Iterator[dict[str, HostSession]]:
    """Open a session with each host, this one first; close all of them in any case.

    Raises:
        UserError: the limit on open files of this process is too low.
    """
    total = 1 + len(others)
    with ExitStack() as stack:
        # This host's agent reports the limit of ranks, so it starts before the limit is raised.
        sessions = {own: stack.enter_context(closing(HostSession(own, here=True)))}
        stack.enter_context(_most_open_files())
        try:
            for name in others:
                sessions[name] = stack.enter_context(closing(HostSession(name, here=False)))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise UserError(
                f"only {len(sessions)} of {total} hosts can be queried at once: {error.strerror}; "
                "each requires 3 files: raise the hard limit (see `ulimit -Hn`), or query fewer "
                "hosts"
            ) from None
        yield sessions


@contextmanager
def _most_open_files() -> Iterator[None]:
    """Raise the soft limit on open files to the hard limit within the context."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def together(sessions: Iterable[HostSession], do: Callable[[HostSession], T]) -> dict[str, T]:
    """Call `do` for all hosts at once; hosts that stop responding are not in the result.

    Returns:
        Name -> result of `do`, in the order of the sessions.

    Raises:
        Exception: the first exception of `do`, except SilentError, which the session records.
    """
    asked = list(sessions)
    found: dict[str, T] = {}
    errors: list[Exception] = []

    def one(session: HostSession) -> None:
        try:
            found[session.name] = do(session)
        except SilentError:
            pass
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(session,), daemon=True) for session in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # each request has its own limit
    if errors:
        raise errors[0]
    return {session.name: found[session.name] for session in asked if session.name in found}


def _remote_command() -> str:
    """Command for any shell: report which `python` it finds, then become the agent."""
    word = f"printf '{MARK}%s\\n'"
    directory, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
    path = shlex.quote(os.environ.get("PATH", os.defpath))
    script = (
        f'{word} "{_SSH_PYTHON} $(command -v python)"; '
        f'{word} "{_PYTHON} $(PATH={path}; command -v python)"; '
        f"cd {directory} 2>/dev/null || {word} {_NO_DIRECTORY}; "
        f"[ -x {python} ] || {{ {word} {_NO_PYTHON}; exit 9; }}; "
        f"exec {shlex.join(_AGENT)}"
    )
    return f"exec sh -c {shlex.quote(script)}"
