"""Selection of processes that form whole replicas of a model that spans several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hvdtrain.elastic.process import Process


def replica_size(processes: Sequence[Process]) -> int:
    """Number of processes that hold one model together, as they report; 1 before any report."""
    return max((p.status.replica_size for p in processes if p.status is not None), default=1)


def choose(waiting: Sequence[Process], most: int) -> list[Process]:
    """Select as many of `waiting` as form whole replicas, in order; the others are spares.

    Processes on hosts whose number of processes is not a multiple of the replica size are omitted
    first; among these, first those that hold no shard, or a shard with many copies. The last
    holder of a shard stays, and so does the last process that has completed the newest step: the
    others complete it with the gradients that they have. If they repeated it, its bits could
    differ from those of the omitted process, which may return.

    Args:
        most: limit of the number of processes.
    """
    size = replica_size(waiting)
    chosen = [*waiting]
    for _ in range(len(chosen) - min(len(chosen), most) // size * size):
        chosen.remove(_least_useful(chosen, size))
    return chosen


def _least_useful(chosen: Sequence[Process], size: int) -> Process:
    held = _held(chosen)
    copies = Counter(held.values())
    on_host = Counter(p.host for p in chosen)
    steps = [p.status.step for p in chosen if p.status and p.number in held]
    newest = max(steps, default=0)

    def use(at: int) -> tuple[bool, bool, int, int, int]:
        process = chosen[at]
        part = held.get(process.number)
        others = len(chosen) if part is None else copies[part] - 1
        beyond = on_host[process.host] % size
        step = process.status.step if process.status and part is not None else None
        is_newest = step == newest and steps.count(newest) == 1
        return others == 0 or is_newest, beyond == 0, beyond, -others, -at

    return chosen[min(range(len(chosen)), key=use)]


def _held(processes: Sequence[Process]) -> dict[int, int]:
    """Process number -> its shard, for processes that can provide it as of the newest step."""
    known = {p.number: p.status for p in processes if p.status and p.status.part is not None}
    top = max((status.step for status in known.values()), default=0)
    return {n: s.part for n, s in known.items() if s.part is not None and s.reaches >= top}
