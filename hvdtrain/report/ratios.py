"""Ratios B/A of the metrics of two runs."""

from __future__ import annotations

from hvdtrain.report.figures import Figures

COMPARED = (
    "steps",
    "ranks",
    "final_loss",
    "final_validation_loss",
    "lowest_validation_loss",
    "median_samples_per_second",
    "median_step_seconds",
    "exposed_share",
    "overlap",
    "bus_bandwidth_bytes_per_second",
    "slowest_rank_median_score",
    "goodput_share",
    "wall_seconds",
    "median_checkpoint_seconds",
    "peak_host_memory_bytes",
    "peak_device_memory_bytes",
)


def ratios(a: Figures, b: Figures) -> dict[str, float | None]:
    """Ratios of `COMPARED` and of the phases; None if a metric is unknown, or A's is 0."""
    found = {name: _ratio(a[name], b[name]) for name in COMPARED}
    for phase in phases(a, b):
        found[f"{phase}_seconds_per_step"] = _ratio(per_step(a, phase), per_step(b, phase))
    return found


def phases(a: Figures, b: Figures) -> list[str]:
    """Names of the phases in either run."""
    names = [*(a["phase_seconds_per_step"] or {}), *(b["phase_seconds_per_step"] or {})]
    return list(dict.fromkeys(names))


def per_step(figures: Figures, phase: str) -> float | None:
    """Seconds per step in a phase, mean over all ranks."""
    value: float | None = (figures["phase_seconds_per_step"] or {}).get(phase)
    return value


def _ratio(a: float | None, b: float | None) -> float | None:
    return b / a if a and b is not None else None
