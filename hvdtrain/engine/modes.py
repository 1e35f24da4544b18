"""Train and eval mode: a model evaluates, and every module is in its own mode again then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the whole model is in eval mode; afterwards each module is in the mode it had.

    A task may keep parts of its model in eval mode, such as a BatchNorm that is not to be
    trained; `model.train()` would wake them. Modules that override `train` are told of both
    changes, as PyTorch would tell them.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # parents come before their children
            if module.training != training:
                module.train(training)
        for module, training in modes:
            module.training = training
