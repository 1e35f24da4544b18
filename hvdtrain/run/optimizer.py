"""Construction of a run's optimizer: by name, with master weights, sharded."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from hvdtrain.config import Config
from hvdtrain.optim.masters import MasterWeights
from hvdtrain.optim.optimizer import build_optimizer
from hvdtrain.optim.precision import BF16_PARAMS, Precision
from hvdtrain.parallel.local_optimizer import LocalOptimizer
from hvdtrain.parallel.zero import ShardedOptimizer
from hvdtrain.tasks import Task, optional


def build_run_optimizer(
    config: Config, task: Task, model: nn.Module, precision: Precision
) -> Optimizer:
    """Build the optimizer of the trained parameters of `model`.

    Raises:
        UserError: the optimizer does not fit the model.
    """
    groups = optional(task, "param_groups")
    optimizer = build_optimizer(config.optim, model, groups(model) if groups else None)
    wrap = MasterWeights if precision.name == BF16_PARAMS else None
    if config.parallel.zero:
        return ShardedOptimizer(optimizer, config.parallel.zero_copies, wrap)
    if config.parallel.spans_ranks:
        return LocalOptimizer(optimizer)
    return wrap(optimizer) if wrap else optimizer
