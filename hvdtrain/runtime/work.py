"""CPU and disk use of a rank, from the kernel's counters of its threads and child processes.

Horovod's threads do not count: they poll, and forward other ranks' data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Horovod's threads: the background thread, and those it starts (Gloo's loops, MPI's progress).
HOROVOD = "horovod"

# https://man7.org/linux/man-pages/man2/PR_SET_NAME.2const.html
_PR_SET_NAME, _PR_GET_NAME = 15, 16
_NAME_BYTES = 16


@contextmanager
def threads_named(name: str) -> Iterator[None]:
    """Context in which threads started by the calling thread get a name.

    Args:
        name: at most 15 bytes.
    """
    prctl = ctypes.CDLL(None).prctl
    before = ctypes.create_string_buffer(_NAME_BYTES)
    prctl(_PR_GET_NAME, before, 0, 0, 0)
    prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_NAME, before, 0, 0, 0)


# The watchdog's main thread: a descendant of the rank that it watches, and always busy.
WATCHDOG = "hvd-watchdog"
IDLE_TICKS = 8  # per second: upper limit of threads that only wake up to poll

_BLOCK = 4096  # bytes; a block read or written counts as much as a tick of CPU time
_FAULT = 4  # blocks per major page fault, at least: for files that are mapped, not read
# Fields of /proc/PID/stat after the name.
_MAJOR_FAULTS = 9
# Ticks of the process itself, and of its ended children.
_OWN_TICKS, _ENDED_TICKS = slice(11, 13), slice(13, 15)
# Disk transfers, and transfers by system calls: some file systems count only the latter.
_DISK, _CALLS = ("read_bytes", "write_bytes"), ("rchar", "wchar")


def work(pid: int) -> int:
    """Return the ticks (10 ms) of CPU time plus blocks read or written that a rank has used so far.

    Counts all its threads except Horovod's, and all its descendants except the watchdog: a
    compiler, a decoder, a download. The sum may decrease when one of these has ended.

    Raises:
        OSError: the rank is gone.
    """
    done = _ticks(stat(Path(f"/proc/{pid}"))[1], _ENDED_TICKS)
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            done += _work_of_thread(thread)
    for child in _descendants(pid):
        with suppress(OSError):  # it has ended
            directory = Path(f"/proc/{child}")
            name, fields = stat(directory)
            if name == WATCHDOG:
                continue
            done += _ticks(fields, _OWN_TICKS) + _ticks(fields, _ENDED_TICKS)
            done += _blocks(directory, _DISK)
    return done


def _work_of_thread(thread: Path) -> int:
    name, fields = stat(thread)
    if name == HOROVOD:
        return 0
    faults = int(fields[_MAJOR_FAULTS])
    return _ticks(fields, _OWN_TICKS) + _FAULT * faults + _blocks(thread, _DISK + _CALLS)


def stat(directory: Path) -> tuple[str, list[str]]:
    """Return the name of a process or thread, and the fields of its `stat` after it.

    Raises:
        OSError: it has ended.
    """
    text = (directory / "stat").read_bytes().decode(errors="replace")
    head, _, tail = text.rpartition(")")
    return head.partition("(")[2], tail.split()


def _ticks(fields: list[str], which: slice) -> int:
    return sum(map(int, fields[which]))


def _blocks(directory: Path, which: tuple[str, ...]) -> int:
    try:
        text = (directory / "io").read_text()
    except OSError:  # it has ended, or this kernel does not count transfers
        return 0
    counts = dict(line.split(": ") for line in text.splitlines())
    return sum(int(counts.get(name, 0)) for name in which) // _BLOCK


def _descendants(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        children = ""
        with suppress(OSError):
            children = (thread / "children").read_text()
        for child in map(int, children.split()):
            yield child
            with suppress(OSError):
                yield from _descendants(child)
