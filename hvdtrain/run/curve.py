"""What the curve of a run follows from."""

from __future__ import annotations

from typing import Any

from hvdtrain.config import Config
from hvdtrain.run.length import dataset_size
from hvdtrain.tasks import Datasets

# What takes the place of batch.global_size with batch.max_tokens.
_BUCKETED = ("batch.max_tokens", "batch.per_step")


def build_identity(config: Config, datasets: Datasets) -> dict[str, Any]:
    """What the run's curve follows from, see RunState."""
    batch = {"batch.global_size": config.batch.global_size}
    if config.batch.max_tokens:
        batch = {name: getattr(config.batch, name[6:]) for name in _BUCKETED}
    return {
        "seed": config.seed,
        **batch,
        "optim.name": config.optim.name,
        "the number of training samples": dataset_size(datasets),
        "the fingerprint of the training data": datasets.fingerprint,
    }
