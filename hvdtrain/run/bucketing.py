"""Micro-batches by sample length, with `batch.max_tokens`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import Dataset

from hvdtrain.config import Config
from hvdtrain.data.buckets import SampleBuckets, lengths_of
from hvdtrain.data.iterable import has_own_order
from hvdtrain.errors import UserError
from hvdtrain.tasks import Datasets


class RunBuckets(NamedTuple):
    """Buckets of the training and validation data; None without `batch.max_tokens`."""

    train: SampleBuckets | None = None
    validation: SampleBuckets | None = None


def build_buckets(config: Config, datasets: Datasets) -> RunBuckets:
    """Sort the samples by length.

    Raises:
        UserError: the samples have no lengths, or a length exceeds the budget.
    """
    if not config.batch.max_tokens:
        return RunBuckets()
    train = _buckets(config, datasets.train, "training")
    if datasets.validation is None:
        return RunBuckets(train)
    return RunBuckets(train, _buckets(config, datasets.validation, "validation"))


def _buckets(config: Config, dataset: Dataset[Any], name: str) -> SampleBuckets:
    if has_own_order(dataset):
        raise UserError(
            f"batch.max_tokens: the {name} data is an IterableDataset, whose samples come in their "
            "own order: leave it at 0"
        )
    budget = config.batch.max_tokens
    return SampleBuckets(lengths_of(dataset, budget, name), budget, config.seed)
