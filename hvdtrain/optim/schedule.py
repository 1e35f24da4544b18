"""The learning rate as a pure function of the step: nothing to save, nothing to resume."""

from __future__ import annotations

import math

from hvdtrain.optim.config import ScheduleConfig


def learning_rate(config: ScheduleConfig, peak: float, step: int, steps: int) -> float:
    """Return the rate of one step.

    Args:
        config: shape of the schedule.
        peak: rate at the end of the warm-up.
        step: 0 <= step < steps.
        steps: all steps of the run.

    Returns:
        Rises linearly to `peak` in the warm-up; then stays constant, or falls to `peak *
        final_ratio` at the last step (cosine: Loshchilov and Hutter, 2017).
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.name == "constant":
        return peak
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    share = 1 - progress if config.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (config.final_ratio + (1 - config.final_ratio) * share)
