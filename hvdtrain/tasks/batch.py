"""Batches of a task's samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, default_collate

from hvdtrain.tasks import Task, optional


def collate_of(task: Task) -> Callable[[list[Any]], Any]:
    """The function that makes a batch of samples."""
    return optional(task, "collate") or default_collate


def first_batch(task: Task, dataset: Dataset[Any], samples: int) -> Any:
    """A batch of the first samples, which are repeated if there are too few."""
    size = len(dataset)  # type: ignore[arg-type]
    return collate_of(task)([dataset[i % size] for i in range(samples)])
