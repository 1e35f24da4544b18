"""Horovod process sets of the ranks that hold the same shard of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import horovod.torch as hvd
from horovod.common import process_sets
from horovod.common.process_sets import ProcessSet as ProcessSet

from hvdtrain.runtime.collectives import lost_ranks
from hvdtrain.runtime.grid import Grid


def set_of_part(grid: Grid, rank: int) -> ProcessSet:
    """Return the set of ranks with the same shard as `rank`; all ranks call it identically.

    Requires HOROVOD_DYNAMIC_PROCESS_SETS=1 (environment.prepare), because the sets depend on the
    ranks' hosts.
    """
    if grid.replica_size == 1 or grid.replicas == 1:
        return hvd.global_process_set
    parts = [sorted(grid.same_part(first)) for first in grid.replica_of(grid.ranks[0])]
    with lost_ranks():
        sets = {tuple(part): _set_of(part) for part in parts}
    return next(found for part, found in sets.items() if rank in part)


@contextmanager
def passing_set(ranks: Sequence[int]) -> Iterator[ProcessSet]:
    """Context with a temporary set of these ranks; all ranks call it identically.

    Raises:
        RankLostError: another rank is gone.
    """
    if len(ranks) == hvd.size():
        yield hvd.global_process_set
        return
    with lost_ranks():
        made = hvd.add_process_set([*ranks])
    yield made
    with lost_ranks():
        hvd.remove_process_set(made)


def _set_of(ranks: list[int]) -> ProcessSet:
    """Return a new set, or an earlier model's set: Horovod rejects two sets of the same ranks."""
    for number, known in process_sets._basics._get_process_set_ids_and_ranks().items():
        if sorted(known) == ranks:
            found = ProcessSet(ranks)
            found.process_set_id = number
            return found
    return hvd.add_process_set(ranks)
