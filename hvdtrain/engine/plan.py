"""How a run proceeds, and what ends it early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvdtrain.data.config import BatchConfig
from hvdtrain.engine.config import TrainConfig
from hvdtrain.runtime.signals import StopFlag


@dataclass(frozen=True)
class Plan:
    """How a run proceeds, the same on every rank.

    Args:
        learning_rate: rate of step s, from 0.
        step_samples: samples of step s, over all ranks together.
        dataset_size: samples of an epoch.
        sync_every: steps from one in which the ranks' states become one to the next.
    """

    train: TrainConfig
    batch: BatchConfig
    learning_rate: Callable[[int], float]
    step_samples: Callable[[int], int]
    dataset_size: int
    sync_every: int = 1


@dataclass(frozen=True)
class Interruptions:
    """What ends a loop early, as this rank has heard of it; all ranks agree on it in each step.

    Args:
        stop: raised when this rank is asked to stop.
        membership_changed: whether this rank has heard that processes join or leave.
    """

    stop: StopFlag
    membership_changed: Callable[[], bool]
