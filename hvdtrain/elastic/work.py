"""How much a rank has worked, seen from outside: its main thread, and the processes it waits for.

Other threads of its own do not count: Horovod's never rests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_BLOCK = 4096  # bytes; read or written, one counts as much as a tick of CPU time
# Fields of /proc/PID/stat after the name: ticks of itself, and of children that have ended.
_OWN_TICKS, _ENDED_TICKS = slice(11, 13), slice(13, 15)


def work(pid: int, without: int = 0) -> int:
    """Ticks (10 ms) of CPU time, and blocks of the disk, that a rank has used so far.

    Of its main thread and of all its descendants: a compiler, a decoder, a download. It may
    be less than before when one of these has ended.

    Args:
        without: a descendant that does not count: the watchdog.

    Raises:
        OSError: the rank is gone.
    """
    main = Path(f"/proc/{pid}/task/{pid}")
    done = _ticks(main, _OWN_TICKS) + _blocks(main) + _ticks(Path(f"/proc/{pid}"), _ENDED_TICKS)
    for child in _descendants(pid, without):
        with suppress(OSError):  # it has ended
            folder = Path(f"/proc/{child}")
            done += _ticks(folder, _OWN_TICKS) + _ticks(folder, _ENDED_TICKS)
            done += _blocks(folder)
    return done


def _ticks(folder: Path, which: slice) -> int:
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[which]))


def _blocks(folder: Path) -> int:
    counts = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
    return (int(counts["read_bytes"]) + int(counts["write_bytes"])) // _BLOCK


def _descendants(pid: int, without: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        children = ""
        with suppress(OSError):
            children = (thread / "children").read_text()
        for child in map(int, children.split()):
            if child != without:
                yield child
                with suppress(OSError):
                    yield from _descendants(child, without)
