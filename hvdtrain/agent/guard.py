"""Parent of one rank: forked by the agent, it ends with the rank and with all that the rank leaves.

    agent -> guard   a pipe: END asks the rank to end (SIGTERM, SIGKILL after GRACE_SECONDS). If the
                     agent is gone, the pipe ends, and the rank is killed at once.
    guard -> agent   its exit code is the rank's; 128 + n if signal n ended the rank

The rank is the leader of a session of its own. The guard adopts every process that the rank's
children leave behind, in whatever session (PR_SET_CHILD_SUBREAPER), and kills them when the rank
has ended. If the guard itself is killed, the kernel kills the rank (PR_SET_PDEATHSIG), and the
agent adopts and kills the rest.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from hvdtrain.runtime.queued_output import flush
from hvdtrain.runtime.signals import ASKING
from hvdtrain.runtime.work import stat

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
END = b"e"
_KILL_SECONDS = 2.0  # waited for processes that the kernel cannot end now
_SET_DEATH_SIGNAL, _SET_NAME, _SET_SUBREAPER = 1, 15, 36  # of prctl(2)
_NOT_STARTED = 127

_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it


class Program(NamedTuple):
    """What a rank runs; `files`: its limits of open files, as of setrlimit."""

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    files: tuple[int, int]


class Started(NamedTuple):
    """A guard and the agent's ends of its pipes; stdout and stderr are the rank's."""

    pid: int
    control: int
    stdout: int
    stderr: int


def set_name(name: str) -> None:
    """Set the name of this process in ps and top."""
    if _prctl is not None:
        _prctl(_SET_NAME, name.encode(), 0, 0, 0)


def end_with(parent: int) -> None:
    """End this process, by SIGKILL, when its parent ends."""
    if _prctl is not None:
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of processes that descendants leave behind."""
    if _prctl is not None:
        _prctl(_SET_SUBREAPER, 1, 0, 0, 0)


def start(program: Program) -> Started:
    """Fork a guard that starts the program; call it in a process with one thread.

    Raises:
        OSError: no process or pipe can be created.
    """
    pipes: list[tuple[int, int]] = []
    try:
        pipes = [os.pipe() for _ in range(3)]
        (control, control_end), (stdout, stdout_end), (stderr, stderr_end) = pipes
        pid = os.fork()
    except OSError:
        for end in (end for pipe in pipes for end in pipe):
            os.close(end)
        raise
    if pid == 0:
        _guard(control, stdout_end, stderr_end, program)
    for end in (control, stdout_end, stderr_end):
        os.close(end)
    for end in (control_end, stdout, stderr):
        os.set_blocking(end, False)
    return Started(pid, control_end, stdout, stderr)


def _guard(control: int, stdout: int, stderr: int, program: Program) -> NoReturn:
    code = _NOT_STARTED
    try:
        wakes = _wake_on_ended_children()
        # The agent's sockets and the other ranks' pipes must end with their owners.
        _close_all_except(0, 1, 2, control, stdout, stderr, *wakes)
        set_name("hvdtrain-guard")
        adopt_orphans()
        rank = _start_rank(stdout, stderr, program)
        os.close(stdout)
        os.close(stderr)
        status = _wait(rank, control, wakes[0])
        _end_the_rest(rank)
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + ended_by if ended_by else os.WEXITSTATUS(status)
    except BaseException:  # this process must not return to the agent's loop
        sys.excepthook(*sys.exc_info())
        flush()
    finally:
        os._exit(code)


def _wake_on_ended_children() -> tuple[int, int]:
    """Return a pipe that becomes readable when a child has ended; ignore all requests to end."""
    wakes, wake = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # The agent decides: a batch system sends these to all processes of a job.
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return wakes, wake


def _close_all_except(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # of the listing itself
                os.close(int(name))


def _start_rank(stdout: int, stderr: int, program: Program) -> int:
    guard, rank = os.getpid(), os.fork()
    if rank:
        return rank
    try:
        os.setsid()
        end_with(guard)
        resource.setrlimit(resource.RLIMIT_NOFILE, program.files)
        signal.set_wakeup_fd(-1)
        # Ignored signals stay ignored in the program; Python ignores the last two.
        for number in (signal.SIGCHLD, *ASKING, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        # It may exist on the driver's host only, or not any more, as the agent's own.
        for directory in (program.directory, ".", "/"):
            with suppress(OSError):
                os.chdir(directory)
                os.getcwd()
                break
        os.execvpe(program.command[0], list(program.command), program.environment)
    except OSError as error:
        where = f"{socket.gethostname()}: {program.command[0]} cannot be started"
        os.write(2, f"hvdtrain agent: {where}: {error.strerror}\n".encode())
    finally:
        os._exit(_NOT_STARTED)


def _wait(rank: int, control: int, wakes: int) -> int:
    """Return the rank's status, as of waitpid, when it has ended; end it if asked."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wakes, select.POLLIN)
    kill_at: float | None = None
    while True:
        left = None if kill_at is None else max(0.0, kill_at - time.monotonic()) * 1000
        ready = dict(poll.poll(left))
        if wakes in ready:
            os.read(wakes, 4096)
        status = _reap(rank)
        if status is not None:
            return status
        if control in ready:
            if os.read(control, 1) == END:
                os.kill(rank, signal.SIGTERM)
                kill_at = time.monotonic() + GRACE_SECONDS
            else:  # the agent is gone
                poll.unregister(control)
                kill_at = time.monotonic()
        if kill_at is not None and time.monotonic() >= kill_at:
            os.kill(rank, signal.SIGKILL)
            kill_at += 1.0


def _reap(rank: int) -> int | None:
    """Return the rank's status if it has ended; reap orphans."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == rank:
            return status
        if not pid:
            return None


def _end_the_rest(rank: int) -> None:
    with suppress(OSError):
        os.killpg(rank, signal.SIGKILL)
    end_children(_KILL_SECONDS)


def end_children(seconds: float, spared_seconds: float = 0.0, spared: str = "") -> dict[int, int]:
    """Kill all children of this process, and what they leave to it, within `seconds`.

    Args:
        spared_seconds: how long they may take to end by themselves.
        spared: name of children that are left alone.

    Returns:
        The pid and the status, as of waitpid, of each child that has ended.
    """
    began, ended = time.monotonic(), dict[int, int]()
    while time.monotonic() - began < seconds:
        time.sleep(0.001)  # the kernel needs a moment for what was killed
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended.update([found])
        except ChildProcessError:
            break
        late = time.monotonic() - began >= spared_seconds
        if late or spared:
            left = [pid for pid, name in children().items() if name != spared]
            if not left:
                break
            for pid in left if late else ():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
    return ended


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    with suppress(OSError, IndexError):
        return stat(Path(f"/proc/{pid}"))[1][0] == "T"
    return False


def children() -> dict[int, str]:
    """Return pid -> name of the children of this process, also of those that have ended."""
    own, found = str(os.getpid()), dict[int, str]()
    for pid in os.listdir("/proc"):
        if pid.isdecimal():
            with suppress(OSError, IndexError):
                name, fields = stat(Path(f"/proc/{pid}"))
                if fields[1] == own:
                    found[int(pid)] = name
    return found
