"""Properties that determine the loss curve of a run."""

from __future__ import annotations

from typing import Any

from hvdtrain.config import Config
from hvdtrain.data.buckets import SampleBuckets
from hvdtrain.run.resolve import dataset_size
from hvdtrain.tasks import Datasets


def build_identity(
    config: Config, datasets: Datasets, buckets: SampleBuckets | None
) -> dict[str, Any]:
    """Return the properties that determine the run's loss curve, see RunState.

    Args:
        buckets: of the training data, with batch.max_tokens.
    """
    batch: dict[str, Any] = {"batch.global_size": config.batch.global_size}
    if buckets is not None:
        batch = {
            "batch.max_tokens": config.batch.max_tokens,
            "batch.per_step": config.batch.per_step,
            "the fingerprint of the samples' lengths": buckets.fingerprint,
        }
    return {
        "seed": config.seed,
        **batch,
        "optim.name": config.optim.name,
        "the number of training samples": dataset_size(datasets),
        "the fingerprint of the training data": datasets.fingerprint,
    }
