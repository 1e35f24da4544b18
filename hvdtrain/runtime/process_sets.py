"""The ranks of each part of the model, as Horovod knows them: its process sets."""

from __future__ import annotations

import horovod.torch as hvd

from hvdtrain.runtime.grid import Grid


def set_of_part(grid: Grid, rank: int) -> hvd.ProcessSet:
    """The ranks that hold the same part of the model as `rank`; all ranks call it, alike.

    Needs HOROVOD_DYNAMIC_PROCESS_SETS=1 (environment.prepare), as the sets follow from where the
    ranks are.
    """
    if grid.replica_size == 1 or grid.replicas == 1:
        return hvd.global_process_set
    parts = [sorted(grid.same_part(first)) for first in grid.replica_of(grid.ranks[0])]
    sets = {tuple(part): hvd.add_process_set(part) for part in parts}
    return next(found for part, found in sets.items() if rank in part)
