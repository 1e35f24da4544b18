"""The optimizer that a run steps with: by name, on masters, and in parts."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from hvdtrain.config import Config
from hvdtrain.optim.masters import MasterWeights
from hvdtrain.optim.optimizer import build_optimizer
from hvdtrain.optim.precision import BF16_PARAMS, Precision
from hvdtrain.parallel.local_optimizer import LocalOptimizer
from hvdtrain.parallel.zero import ShardedOptimizer
from hvdtrain.runtime.context import RankContext
from hvdtrain.tasks import Task, optional


def build_run_optimizer(
    config: Config, task: Task, model: nn.Module, precision: Precision, elastic: bool
) -> Optimizer:
    """Over the trained parameters of `model`.

    Raises:
        UserError: it does not fit the model.
    """
    groups = optional(task, "param_groups")
    optimizer = build_optimizer(config.optim, model, groups(model) if groups else None)
    wrap = MasterWeights if precision.name == BF16_PARAMS else None
    if config.parallel.zero:
        return ShardedOptimizer(optimizer, config.parallel.zero_copies, elastic, wrap)
    if config.parallel.spans_ranks:
        return LocalOptimizer(optimizer)
    return wrap(optimizer) if wrap else optimizer


def build_agree(
    wait: Callable[[bool], None] | None, context: RankContext
) -> Callable[[bool], None]:
    """What an update calls before it steps, see Update.

    Args:
        wait: for the other ranks, where a rank must not step before all can.
    """

    def agree(applied: bool) -> None:
        if wait is not None:
            with context.timer.inside("comm_exposed"):
                wait(applied)

    return agree
