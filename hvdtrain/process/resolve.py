"""The configuration of a run with all values that depend on its ranks and its data.

`resolve` derives them once per process:

- `batch.global_size` and `optim.lr`, if `batch.per_rank_size` is set, from the number of ranks;
- the steps, if `train.duration` is in epochs, from the number of samples;
- the buckets of samples by length, if `batch.max_tokens` is set;
- the specification of the samples' order, unless they are in buckets or the dataset is iterable;
- `integrity.replay_every`, if it is null, from what the run allows.

`batch.micro_size auto` is resolved later, because it needs the model (fit.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from hvdtrain.config import Config, Settings
from hvdtrain.data.buckets import SampleBuckets, lengths_of
from hvdtrain.data.loader import has_own_order
from hvdtrain.data.order import (
    MixedOrder,
    Specification,
    build_order,
    has_order,
    specification_of,
)
from hvdtrain.data.stream import length_of
from hvdtrain.engine.config import DEFAULT_REPLAY_EVERY, IntegrityConfig
from hvdtrain.errors import UserError
from hvdtrain.runtime.mesh import Topology
from hvdtrain.tasks import Datasets
from hvdtrain.text import epochs, plural


class RunBuckets(NamedTuple):
    """Buckets of the training and validation data; None without `batch.max_tokens`."""

    train: SampleBuckets | None = None
    validation: SampleBuckets | None = None


@dataclass(frozen=True)
class Resolved:
    """A resolved configuration.

    Args:
        config: with the derived values; `train.duration` is a number of steps.
        buckets: buckets of the samples, by length.
        epoch_samples: samples of an epoch of the training data; of a mixture, of all sources; 0 if
            unknown.
        order: specification of the order, see data/order.py; None: buckets, or an iterable dataset.
    """

    config: Config
    buckets: RunBuckets
    epoch_samples: int
    order: Specification | None = None

    def samples_of(self, step: int) -> int:
        """Return the number of samples of a step, over all ranks."""
        batch, buckets = self.config.batch, self.buckets.train
        return batch.global_size if buckets is None else buckets.samples_of(step, batch.per_step)

    def samples_before(self, step: int) -> int:
        """Return the number of samples of the steps before `step`, over all ranks."""
        batch, buckets = self.config.batch, self.buckets.train
        if buckets is None:
            return step * batch.global_size
        return buckets.order.samples_before(step * batch.per_step)

    def describe_length(self) -> str:
        """Describe steps, samples and epochs in one short line."""
        batch, buckets, size = self.config.batch, self.buckets.train, self.epoch_samples
        steps = plural(self.config.train.steps, "step")
        if buckets is not None:
            done = self.config.train.steps * batch.micro_batches
            each = plural(batch.micro_batches, "micro-batch", "micro-batches")
            return f"{steps} of {each}: {epochs(done / len(buckets), size)}"
        total = self.config.train.steps * batch.global_size
        head = f"{steps} of {plural(batch.global_size, 'sample')}"
        if self.order is not None and "sources" in self.order:
            order = build_order(self.order, self.config.seed, batch.global_size)
            assert isinstance(order, MixedOrder)
            counts = zip(order.before(total), order.orders.items(), strict=True)
            return f"{head}: " + ", ".join(
                f"{name} {epochs(count / source.size, source.size)}"
                for count, (name, source) in counts
            )
        if not size:
            return f"{head}; the length of the data is unknown"
        return f"{head}: {epochs(total / size, size)}"


def resolve(settings: Settings, topology: Topology, datasets: Datasets) -> Resolved:
    """Derive the values of the configuration that depend on the ranks and the data.

    Raises:
        UserError: a key refers to a step beyond the last one, requires validation data, or the
            samples cannot be sorted by length or read in the configured order.
    """
    config = with_replays(with_global_batch(settings.config, topology.world_size), datasets)
    buckets = build_buckets(config, datasets)
    order = build_specification(config, datasets)
    config = with_steps(config, datasets, buckets.train)
    return Resolved(config, buckets, dataset_size(datasets), order)


def build_specification(config: Config, datasets: Datasets) -> Specification | None:
    """Return the specification of the order of the training data, see Resolved.

    Raises:
        UserError: the data cannot be read in the configured order.
    """
    if has_own_order(datasets.train):
        if config.loader.order != "shuffled":
            raise UserError(
                f"loader.order {config.loader.order}: the training data is an IterableDataset, "
                "which has its own order: use shuffled"
            )
        return None
    return None if config.batch.max_tokens else specification_of(datasets.train, config.loader)


def dataset_size(datasets: Datasets) -> int:
    """Return the number of samples of an epoch; 0 if the training data does not know it."""
    return length_of(datasets.train) or 0


def with_global_batch(config: Config, world_size: int) -> Config:
    """Return the configuration with global batch and learning rate derived from the world size.

    Applies only if `batch.per_rank_size` is set. The learning rate is scaled as in Goyal et al.,
    arXiv:1706.02677, with the batch of one rank as the reference.
    """
    if not config.batch.per_rank_size:
        return config
    batch = replace(config.batch, global_size=config.batch.per_rank_size * world_size)
    factor = {"none": 1.0, "linear": float(world_size), "sqrt": world_size**0.5}
    optim = replace(config.optim, lr=config.optim.lr * factor[config.optim.scale_lr])
    return replace(config, batch=batch, optim=optim)


def with_replays(config: Config, datasets: Datasets) -> Config:
    """Return the configuration with a number in `integrity.replay_every`.

    Raises:
        UserError: replays are configured, but the samples can only be read in their own order.
    """
    every, own_order = config.integrity.replay_every, has_own_order(datasets.train)
    if every and own_order:
        raise UserError(
            f"integrity.replay_every {every}: the training data is an IterableDataset, of which a "
            "rank cannot load another rank's micro-batch: use 0"
        )
    if every is not None:
        return config
    try:
        every = 0 if own_order else DEFAULT_REPLAY_EVERY
        return replace(config, integrity=IntegrityConfig(every))
    except ValueError:  # the table of checks excludes them
        return replace(config, integrity=IntegrityConfig(0))


def with_steps(config: Config, datasets: Datasets, buckets: SampleBuckets | None = None) -> Config:
    """Return the configuration with a number of steps in `train.duration`.

    Args:
        buckets: buckets of the training data, with batch.max_tokens.

    Raises:
        UserError: a key refers to a step beyond the last one, or requires validation data.
    """
    if datasets.validation is None and (config.train.patience or config.checkpoint.keep_best):
        key = "train.patience" if config.train.patience else "checkpoint.keep_best"
        raise UserError(f"{key} requires validation data, and the task {config.task} has none")
    if not config.train.epochs:
        return config
    if has_order(datasets.train):
        raise UserError(
            f"train.duration {config.train.duration}: each source of a mixture has epochs of its "
            "own: set a number of steps"
        )
    epochs = config.train.epochs
    if buckets is None and not dataset_size(datasets):
        raise UserError(
            f"train.duration {config.train.duration}: the training data has no length, so the "
            "number of steps is unknown: set a number of steps"
        )
    if buckets is None:
        steps = ceil(epochs * dataset_size(datasets) / config.batch.global_size)
    else:
        steps = ceil(epochs * len(buckets) / config.batch.micro_batches)
    try:
        return replace(config, train=replace(config.train, duration=steps))
    except ValueError as error:
        raise UserError(str(error)) from None


def build_buckets(config: Config, datasets: Datasets) -> RunBuckets:
    """Sort the samples by length, with `batch.max_tokens`.

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
            f"batch.max_tokens {config.batch.max_tokens}: the {name} data is an IterableDataset, "
            "whose samples have their own order: use 0"
        )
    if has_order(dataset):
        raise UserError(
            f"batch.max_tokens {config.batch.max_tokens}: a mixture has an order of its own: use 0"
        )
    budget = config.batch.max_tokens
    return SampleBuckets(lengths_of(dataset, budget, name), budget, config.seed)
