"""Optimal checkpoint interval, and the goodput under failures."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt

from hvdtrain.errors import require

# Measured from a killed rank to the next step, see docs/elasticity.md and docs/launch.md:
# most of RESTART_SECONDS is the start of the ranks.
ELASTIC_SECONDS = 0.4
RESTART_SECONDS = 8.5


@dataclass(frozen=True)
class Failures:
    """Rate and cost of failures.

    Args:
        mtbf: seconds between two failures of any host of the job; inf: no failures.
        save_seconds: time by which a checkpoint stalls the steps.
        restart_seconds: from a failure to the next step.
        redone: whether the steps since the last checkpoint are lost. In an elastic run the
            surviving ranks have the state, and no step is lost.
    """

    mtbf: float
    save_seconds: float
    restart_seconds: float
    redone: bool = True

    def __post_init__(self) -> None:
        require(self.mtbf > 0, f"the time between failures must be > 0, not {self.mtbf}")
        require(self.save_seconds >= 0, "a checkpoint takes 0 s or more")
        require(self.restart_seconds >= 0, "a restart takes 0 s or more")


def young(failures: Failures) -> float:
    """Seconds of training between two checkpoints that minimize the lost time, to first order.

    Young, "A first order approximation to the optimum checkpoint interval" (1974).
    """
    return sqrt(2 * failures.save_seconds * failures.mtbf)


def daly(failures: Failures) -> float:
    """Like `young`, for saves that are not short relative to the time between failures.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006),
    equation 37.
    """
    save, mtbf = failures.save_seconds, failures.mtbf
    if mtbf == inf:
        return inf
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return sqrt(2 * save * mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9) - save


def goodput(failures: Failures, interval: float) -> float:
    """Fraction of the time spent in steps that count; 1 without failures and saves.

    If steps are redone, this is Daly's expectation for random failures at a constant rate, which
    may also occur during saves and starts. Otherwise only saves and starts are lost.

    Args:
        interval: seconds of training between two checkpoints.
    """
    require(interval > 0, f"checkpoints are some time apart, not {interval} s")
    saving = 1.0 if interval == inf else interval / (interval + failures.save_seconds)
    if failures.mtbf == inf:
        return saving
    if not failures.redone:
        return saving * failures.mtbf / (failures.mtbf + failures.restart_seconds)
    lengths = (interval + failures.save_seconds) / failures.mtbf
    starts = failures.restart_seconds / failures.mtbf
    if starts + lengths > 700:  # never finishes: the exponential would overflow
        return 0.0
    expected = failures.mtbf * exp(starts) * expm1(lengths)
    return interval / expected
