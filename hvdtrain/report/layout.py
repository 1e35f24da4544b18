"""Layout of a model over the ranks of a run: what each rank held, and the waits between ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.report.run import Column, Run
from hvdtrain.runtime.mesh import WAITED

Figures = dict[str, Any]


def layout(run: Run) -> Figures | None:
    """Layout of a run; None if each rank held the whole model.

    Returns:
        picture: lines, in the format of --print_layout.
        wait_seconds_per_step: for each measured axis, mean over the ranks.
        bubble_share: fraction of the pipeline schedules' time that ranks waited; None: no pipeline.
        bubble_formula_share: the same if all stages were equally fast.
        ranks: for each rank its place, host, bytes of parameters and peak memory.
    """
    coordinates = run.manifest.get("coordinates")
    if not coordinates:
        return None
    waits, schedule = {}, 0.0
    if run.ranks is not None:
        steps = float((run.ranks.steps * run.ranks.world_size).sum())
        found = {axis: _sum(run.ranks.figures[f"{axis}_wait_seconds"]) for axis in WAITED}
        waits = {axis: seconds / steps for axis, seconds in found.items() if seconds and steps}
        schedule = _sum(run.ranks.figures["schedule_seconds"])
    return {
        "picture": run.manifest.get("layout", []),
        "wait_seconds_per_step": waits,
        "bubble_share": found["pipeline"] / schedule if schedule else None,
        "bubble_formula_share": run.ranks.bubble_formula if run.ranks else None,
        "ranks": [_rank(run, rank, at) for rank, at in enumerate(coordinates)],
    }


def _rank(run: Run, rank: int, at: dict[str, int]) -> Figures:
    return {
        "rank": rank,
        "host": run.host(rank),
        "place": at,
        "parameter_bytes": _peak(run, "parameter_bytes", rank),
        "peak_host_memory_bytes": _peak(run, "host_memory_bytes", rank),
        "peak_device_memory_bytes": _peak(run, "device_memory_bytes", rank),
    }


def _peak(run: Run, name: str, rank: int) -> int | None:
    if run.ranks is None or rank >= run.ranks.figures[name].shape[1]:
        return None
    values = run.ranks.figures[name][:, rank]
    known = values[np.isfinite(values)]
    return int(known.max()) if len(known) and known.max() > 0 else None


def _sum(values: Column) -> float:
    return float(np.nansum(values, dtype=np.float64))
