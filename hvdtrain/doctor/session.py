"""A host that is asked: its agent, started over ssh once, and all that is said with it."""

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
from hvdtrain.launch.commands import SSH_OPTIONS

T = TypeVar("T")

LOGIN_SECONDS = 25.0  # ssh itself gives up after 3
_PYTHON, _SSH_PYTHON, _NO_FOLDER, _NO_PYTHON = "python", "ssh-python", "no-folder", "no-python"
_AGENT = [sys.executable, "-m", "hvdtrain.doctor.agent"]


class SilentError(Exception):
    """A host does not answer, or cannot; the message says how."""


@dataclass
class Login:
    """How the first word with a host went.

    Args:
        python: path of `python` there with this process's PATH; "" if there is none.
        ssh_python: path of `python` there with the PATH of a command over ssh.
        folder: this working folder is there.
        interpreter: this very Python is there, under the same path.
        said: the last lines of ssh or Python, where no agent spoke.
    """

    python: str = ""
    ssh_python: str = ""
    folder: bool = True
    interpreter: bool = True
    said: list[str] = field(default_factory=list)


class Session:
    """The agent of one host, up until `close`.

    Args:
        name: of the host, as ssh takes it.
        here: it is this very host: no ssh.

    Attributes:
        login: how it began.
        failures: questions that were not answered, and why: what was asked is not known then.
    """

    def __init__(self, name: str, here: bool) -> None:
        self.name, self.here = name, here
        self.login = Login()
        self.failures: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the agent
        argv = _AGENT if here else ["ssh", *SSH_OPTIONS, name, _remote_command()]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
        )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def start(self) -> bool:
        """Waits until the agent speaks; `login` says why it does not."""
        deadline = time.monotonic() + LOGIN_SECONDS
        try:
            while True:
                word = self._next(deadline - time.monotonic())
                if word.startswith("{"):
                    break
                self._note(word)
        except SilentError as error:
            self.login.said = self._last_lines() or [str(error)]
            self.close()  # its late word would be taken for an answer
        return not self.login.said

    def ask(self, do: str, limit: float, **arguments: Any) -> Any:
        """What the agent answers; see agent.py.

        Args:
            limit: seconds.

        Raises:
            SilentError: it does not within `limit`, or says that it cannot.
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
            said = json.loads(self._next(limit))
        except SilentError:
            self.close()  # what it answers later would be taken for the next answer
            raise
        if "error" in said:
            raise SilentError(said["error"])
        return said["answer"]

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
        elif kind == _NO_FOLDER:
            self.login.folder = False
        elif kind == _NO_PYTHON:
            self.login.interpreter = False

    def _next(self, seconds: float) -> str:
        """The next line of the agent, or of the shell before it."""
        try:
            line = self._lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise SilentError("no answer in time") from None
        if line is None:
            raise SilentError(self._last_line() or "the connection ended")
        return line

    def _read(self, source: IO[str]) -> None:
        with suppress(OSError, ValueError):
            for line in source:
                # What a ~/.bashrc prints comes before, in lines of its own or in front.
                _, mark, word = line.partition(MARK)
                if mark:
                    self._lines.put(word.rstrip("\n"))
        self._lines.put(None)

    def _last_line(self) -> str:
        return next(reversed(self._last_lines()), "")

    def _last_lines(self) -> list[str]:
        """Of its error output, as the end of it stands there now."""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - 4096))
        lines = self._said.read().decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip(" @\r")]


@contextmanager
def opened(own: str, others: Sequence[str]) -> Iterator[dict[str, Session]]:
    """A session with each host, this one first; all are closed in any case.

    Raises:
        UserError: this process may not open as many files.
    """
    total = 1 + len(others)
    with ExitStack() as stack:
        # This host's agent tells the limit that ranks here have: it comes before that is raised.
        sessions = {own: stack.enter_context(closing(Session(own, here=True)))}
        stack.enter_context(_most_open_files())
        try:
            for name in others:
                sessions[name] = stack.enter_context(closing(Session(name, here=False)))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise UserError(
                f"only {len(sessions)} of {total} hosts can be asked at once: {error.strerror}; "
                "each takes 3: raise the hard limit (`ulimit -Hn` shows it), or name fewer hosts"
            ) from None
        yield sessions


@contextmanager
def _most_open_files() -> Iterator[None]:
    """The soft limit is as high as the hard one meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def together(sessions: Iterable[Session], do: Callable[[Session], T]) -> dict[str, T]:
    """Does something with all hosts at once; those that fall silent are not in the result.

    Returns:
        Name -> what was done, in the order of the sessions.

    Raises:
        Exception: the first that `do` raised, but SilentError, which the session keeps.
    """
    asked = list(sessions)
    found: dict[str, T] = {}
    errors: list[Exception] = []

    def one(session: Session) -> None:
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
        thread.join()  # each question has a limit of its own
    if errors:
        raise errors[0]
    return {session.name: found[session.name] for session in asked if session.name in found}


def _remote_command() -> str:
    """For a shell of any kind: reports what `python` is, then becomes the agent."""
    word = f"printf '{MARK}%s\\n'"
    folder, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
    path = shlex.quote(os.environ.get("PATH", os.defpath))
    script = (
        f'{word} "{_SSH_PYTHON} $(command -v python)"; '
        f'{word} "{_PYTHON} $(PATH={path}; command -v python)"; '
        f"cd {folder} 2>/dev/null || {word} {_NO_FOLDER}; "
        f"[ -x {python} ] || {{ {word} {_NO_PYTHON}; exit 9; }}; "
        f"exec {shlex.join(_AGENT)}"
    )
    return f"exec sh -c {shlex.quote(script)}"
