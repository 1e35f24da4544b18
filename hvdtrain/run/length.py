"""Global batch size of a run, and its length in steps and epochs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

from hvdtrain.config import Config
from hvdtrain.data.buckets import SampleBuckets
from hvdtrain.errors import UserError
from hvdtrain.tasks import Datasets


def dataset_size(datasets: Datasets) -> int:
    """Number of samples in an epoch."""
    return len(datasets.train)  # type: ignore[arg-type]


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


def with_steps(config: Config, datasets: Datasets, buckets: SampleBuckets | None = None) -> Config:
    """Return the configuration with the number of steps in `train.epochs`, if that is set.

    Args:
        buckets: of the training data, with batch.max_tokens.

    Raises:
        UserError: a key refers to a step beyond the last one, or requires validation data.
    """
    if datasets.validation is None and (config.train.patience or config.checkpoint.keep_best):
        key = "train.patience" if config.train.patience else "checkpoint.keep_best"
        raise UserError(f"{key} needs validation data, and the task {config.task} has none")
    if not config.train.epochs:
        return config
    # As written in the configuration: 0.1 is exactly a tenth, not a binary float.
    epochs = Fraction(repr(config.train.epochs))
    if buckets is None:
        steps = ceil(epochs * dataset_size(datasets) / config.batch.global_size)
    else:
        steps = ceil(epochs * len(buckets) / config.batch.micro_batches)
    try:
        return replace(config, train=replace(config.train, steps=steps, epochs=0.0))
    except ValueError as error:
        raise UserError(str(error)) from None


def describe(config: Config, size: int, buckets: SampleBuckets | None = None) -> str:
    """Describe steps, epochs and samples in one line, and how the last samples are used.

    Args:
        config: result of `with_steps`.
        size: samples of an epoch.
        buckets: of the training data, with batch.max_tokens.
    """
    steps, batch = config.train.steps, config.batch.global_size
    if buckets is not None:
        each = config.batch.micro_batches
        return (
            f"{steps} steps of {each} micro-batches are {steps * each / len(buckets):.2f} epochs "
            f"of {len(buckets)} micro-batches, which hold {size} samples in {len(buckets.sizes)} "
            f"buckets, padded to {config.batch.max_tokens} tokens at most; no sample is left out: "
            "a step at an epoch's end goes on with the next epoch"
        )
    epochs, beyond = divmod(steps * batch, size)
    whole = (
        "no sample is left out: a step at an epoch's end goes on with the next epoch"
        if size % batch
        else "an epoch is a whole number of steps"
    )
    rest = f"; the last step ends {beyond} samples into epoch {epochs + 1}" if beyond else ""
    return (
        f"{steps} steps of {batch} samples are {steps * batch / size:.2f} epochs of {size} "
        f"samples; {whole}{rest}"
    )
