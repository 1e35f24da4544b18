"""Loading of micro-batches by their place in a run, optionally in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, default_collate

from hvdtrain.data.config import LoaderConfig
from hvdtrain.data.worker import begin_worker
from hvdtrain.errors import UserError
from hvdtrain.runtime.device import seed_all

# Timeout of a rank for a worker; the same as for a collective that another rank does not join.
_WORKER_SECONDS = 900.0
Batch = Any  # result of collate: tensors, or dicts and tuples of them


@dataclass(frozen=True)
class Loading:
    """Options for loading batches, in training and evaluation.

    Args:
        config: processes that load ahead; none for an iterable dataset.
        pin_memory: copy batches into page-locked memory, for CUDA.
        collate: makes a batch of samples.
    """

    config: LoaderConfig = field(default_factory=LoaderConfig)
    pin_memory: bool = False
    collate: Callable[[list[Any]], Any] = default_collate


IN_RANK = Loading()


class Place(NamedTuple):
    """A micro-batch: its step in the run, its number in the step, and its samples."""

    step: int
    number: int
    samples: Sequence[int]


class MicroBatches(Dataset[Batch]):
    """Micro-batches by place; the random numbers drawn in loading depend only on the place."""

    def __init__(
        self, dataset: Dataset[Any], seed: int, kind: int, collate: Callable[[list[Any]], Any]
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._kind = kind
        self._collate = collate

    def __getitem__(self, place: Place) -> Batch | UserError:
        """The micro-batch, or the error: raised in a worker, it would become a traceback."""
        seed_all(self._seed, place.step, place.number, self._kind)
        try:
            several = getattr(self._dataset, "__getitems__", None)
            if several is not None:
                return self._collate(several(place.samples))
            return self._collate([self._dataset[index] for index in place.samples])
        except UserError as error:
            return error


def load(batches: MicroBatches, places: Iterable[Place], loading: Loading) -> Iterator[Batch]:
    workers = loading.config.workers
    return iter(
        DataLoader(
            batches,
            sampler=places,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=workers,
            timeout=_WORKER_SECONDS if workers else 0.0,
            prefetch_factor=loading.config.prefetch if workers else None,
            worker_init_fn=begin_worker,
            pin_memory=loading.pin_memory,
        )
    )


def _as_it_is(batch: Batch) -> Batch:
    return batch
