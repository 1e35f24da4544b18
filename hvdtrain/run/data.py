"""Task of a run and its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hvdtrain.config import Config, Settings
from hvdtrain.data.loader import has_own_order
from hvdtrain.data.stream import has_state, length_of
from hvdtrain.errors import UserError
from hvdtrain.tasks import Datasets, Task


def build_data(settings: Settings) -> tuple[Task, Datasets]:
    """Build the task and its data.

    Raises:
        UserError: as build_datasets.
    """
    task = build_task(settings)
    return task, build_datasets(task, settings.config)


def build_task(settings: Settings) -> Task:
    """Build the task; its constructor gets the task's configuration if it has one."""
    own = settings.task_config
    return settings.task_class() if own is None else settings.task_class(own)


def build_datasets(task: Task, config: Config) -> Datasets:
    """Build the task's data.

    Raises:
        UserError: a dataset has no samples or no length although it needs one, is a dictionary of
            datasets or can be read only once, or loader.workers does not fit.
    """
    datasets = task.datasets()
    for name, dataset in (("training", datasets.train), ("validation", datasets.validation)):
        if dataset is None:
            continue
        if isinstance(dataset, Mapping) and dataset and 0 not in dataset:
            names = [str(name) for name in dataset]
            raise UserError(
                f"task {config.task}: the {name} data is a {type(dataset).__name__} of datasets "
                f"({', '.join(names)}): use one of them, such as dataset[{names[0]!r}]"
            )
        size = length_of(dataset)
        if size is None and isinstance(dataset, Iterator) and not has_state(dataset):
            raise UserError(
                f"task {config.task}: the {name} data is a {type(dataset).__name__}, which can be "
                "read only once: use a list of samples, or a dataset with __len__ and __getitem__"
            )
        if size is None and not (dataset is datasets.train and has_state(dataset)):
            state = ", or state_dict and load_state_dict" if dataset is datasets.train else ""
            raise UserError(
                f"task {config.task}: the {name} data has no length: {type(dataset).__name__} "
                f"needs __len__, the number of samples of an epoch{state}"
            )
        if size == 0:
            raise UserError(f"task {config.task}: the {name} data has no samples")
    workers = config.loader.workers
    if workers and has_own_order(datasets.train) and not has_state(datasets.train):
        raise UserError(
            f"loader.workers {workers}: the training data is an IterableDataset "
            "without state_dict and load_state_dict, which each rank reads itself: use 0, or add "
            "these methods"
        )
    if workers > 1 and has_own_order(datasets.train):
        note = (
            f"loader.workers {workers}: one process reads ahead, because each would have to read "
            "all samples of the iterable dataset"
        )
        return datasets._replace(notes=(*datasets.notes, note))
    return datasets
