"""Construction of a run's model, and its FLOPs."""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.config import Config
from hvdtrain.engine.flops import ModelFlops, count
from hvdtrain.optim.freeze import freeze
from hvdtrain.optim.precision import BF16_PARAMS, check_parameters, to_bfloat16
from hvdtrain.optim.supported import check_device, check_model
from hvdtrain.runtime.device import seed_all
from hvdtrain.tasks import Datasets, Task
from hvdtrain.telemetry.peaks import peak_of


def build_model(task: Task, config: Config, device: torch.device) -> nn.Module:
    """Build the task's model, initialised from the seed.

    Raises:
        UserError: the model cannot be trained, or a name in optim.freeze matches nothing in it.
    """
    seed_all(config.seed)
    model: nn.Module = task.model()
    freeze(model, config.optim.freeze)
    check_model(model)
    check_parameters(config.precision.name, model)
    if config.precision.name == BF16_PARAMS:
        to_bfloat16(model)
    model = model.to(device)
    check_device(model, device)
    return model


def build_flops(
    config: Config, task: Task, datasets: Datasets, model: nn.Module, dtype: torch.dtype
) -> ModelFlops | None:
    """Return the FLOPs of the model and the device; None unless both are known.

    Args:
        dtype: of matrix products.
    """
    device = next(model.parameters()).device
    if config.batch.max_tokens:
        return None  # micro-batches differ
    peak = config.telemetry.peak_flops or peak_of(device, dtype)
    samples = config.batch.micro_size
    flops = count(task, model, datasets.train, samples) if peak else None
    return ModelFlops(flops / samples, peak) if peak and flops else None
