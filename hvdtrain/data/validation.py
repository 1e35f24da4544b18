"""Validation data, assigned to ranks by micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from hvdtrain.data.buckets import SampleBuckets
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.loader import (
    IN_RANK,
    VALIDATION_SEED,
    Batch,
    Loading,
    MicroBatches,
    Place,
    has_own_order,
    load,
)
from hvdtrain.data.stream import read_validation
from hvdtrain.errors import UserError
from hvdtrain.runtime.device import seed_all
from hvdtrain.runtime.mesh import Group


@dataclass(frozen=True)
class ValidationData:
    """Data of an evaluation.

    Args:
        seed: the run's seed.
        buckets: samples of each micro-batch, with batch.max_tokens.
    """

    dataset: Dataset[Any]
    seed: int
    loading: Loading = IN_RANK
    buckets: SampleBuckets | None = None

    def places(self, batches: int, batch: BatchConfig) -> list[Sequence[int]]:
        """The samples of each micro-batch, for at most `batches` global batches."""
        if self.buckets is not None:
            count = min(batches * batch.micro_batches, len(self.buckets))
            return [self.buckets.micro_batch(position) for position in range(count)]
        size = len(self.dataset)  # type: ignore[arg-type]
        return validation_places(min(batches * batch.global_size, size), batch.micro_samples)

    def batches(
        self, places: Sequence[Sequence[int]], group: Group, together: int = 1
    ) -> Iterator[tuple[int, Batch]]:
        """See validation_batches.

        Args:
            together: number of consecutive ranks that must have equally many batches. If there are
                too few batches, some ranks compute the first one again, as a batch of 0 samples.
        """
        padded = [*places, *([places[0]] * (-len(places) % together))]
        found = validation_batches(self.dataset, padded, group, self.seed, self.loading)
        own = range(len(padded))[group.rank :: group.size]
        for number, (samples, batch) in zip(own, found, strict=True):
            yield samples if number < len(places) else 0, batch


def validation_places(samples: int, micro_size: int) -> list[Sequence[int]]:
    """The micro-batches of the first samples, in order."""
    return [range(i, min(i + micro_size, samples)) for i in range(0, samples, micro_size)]


def validation_batches(
    dataset: Dataset[Any],
    places: Sequence[Sequence[int]],
    group: Group,
    seed: int,
    loading: Loading = IN_RANK,
) -> Iterator[tuple[int, Batch]]:
    """This rank's share of the micro-batches at `places`: (samples in the batch, batch).

    Random numbers are seeded before each batch is loaded, and again afterwards. The seed depends
    only on the run's seed and the batch's place in the data: neither the world size, nor the number
    of processes, nor the step changes the numbers drawn.

    Args:
        places: the samples of each micro-batch; for an iterable dataset the first ones, in order.

    Raises:
        UnsupportedTaskError: on each rank, an iterable dataset is shorter than its length.
        UserError: a sample cannot be loaded.
    """
    own = range(len(places))[group.rank :: group.size]
    if not own and not has_own_order(dataset):
        return
    batches = (
        read_validation(dataset, places, own, seed, loading.collate)
        if has_own_order(dataset)
        else load(
            MicroBatches(dataset, seed, VALIDATION_SEED, loading.collate),
            [Place(0, number, places[number]) for number in own],
            loading,
        )
    )
    for number, batch in zip(own, batches, strict=True):
        if isinstance(batch, UserError):
            raise batch
        if not has_own_order(dataset):
            seed_all(seed, 0, number, VALIDATION_SEED)
        yield len(places[number]), batch
