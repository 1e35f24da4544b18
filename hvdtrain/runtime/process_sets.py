"""The ranks of each part of the model, as Horovod knows them: its process sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import horovod.torch as hvd
from horovod.common import process_sets
from horovod.common.process_sets import ProcessSet as ProcessSet

from hvdtrain.runtime.collectives import lost_ranks
from hvdtrain.runtime.grid import Grid


def set_of_part(grid: Grid, rank: int) -> ProcessSet:
    """The ranks that hold the same part of the model as `rank`; all ranks call it, alike.

    Needs HOROVOD_DYNAMIC_PROCESS_SETS=1 (environment.prepare), as the sets follow from where the
    ranks are.
    """
    if grid.replica_size == 1 or grid.replicas == 1:
        return hvd.global_process_set
    parts = [sorted(grid.same_part(first)) for first in grid.replica_of(grid.ranks[0])]
    with lost_ranks():
        sets = {tuple(part): _set_of(part) for part in parts}
    return next(found for part, found in sets.items() if rank in part)


@contextmanager
def passing_set(ranks: Sequence[int]) -> Iterator[ProcessSet]:
    """A set of these ranks, for a while; all ranks call it, alike.

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
    """A new one, or that of an earlier model of this process: Horovod takes no two."""
    for number, known in process_sets._basics._get_process_set_ids_and_ranks().items():
        if sorted(known) == ranks:
            found = ProcessSet(ranks)
            found.process_set_id = number
            return found
    return hvd.add_process_set(ranks)
