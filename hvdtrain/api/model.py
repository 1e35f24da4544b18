"""The trained model of a run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hvdtrain.checkpoint.spread import as_in
from hvdtrain.checkpoint.weights import read_weights
from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.process.data import build_task
from hvdtrain.runtime.tensor_shards import model_tensors
from hvdtrain.tasks.language_model import LanguageModel


@torch.no_grad()
def load_model(run: Path) -> nn.Module:
    """See `hvdtrain.api.run.Run.model`."""
    settings = parse(["--config", str(run / "config.yaml")])
    weights = read_weights(run).tensors
    task = build_task(settings)
    if isinstance(task, LanguageModel):
        return task.model_of(weights).eval()
    task.datasets()  # some models take sizes from their data
    model: nn.Module = task.model()
    tensors, own = as_in(model, weights), model_tensors(model)
    shapes, found = ({n: t.shape for n, t in some.items()} for some in (own, tensors))
    other = {name for name, _ in shapes.items() ^ found.items()}
    if other:
        raise UserError(
            f"{run}: {len(other)} tensors of its checkpoint differ from the model that task "
            f"{settings.config.task} creates now, such as {min(other)}: has its code or data "
            "changed?"
        )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
    return model.eval()
