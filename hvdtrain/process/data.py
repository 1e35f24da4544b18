"""Task of a run and its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from hvdtrain.config import Config, Settings
from hvdtrain.data.batched import batches_of
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
            datasets, can be read only once or yields batches, or loader.workers does not fit.
    """
    datasets = task.datasets()
    notes = [*datasets.notes]
    for name, dataset in (("training", datasets.train), ("validation", datasets.validation)):
        if dataset is None:
            continue
        _refuse_other_objects(dataset, name)
        _refuse_loaders(dataset, name)
        notes += _check_batches(dataset, name)
        size = length_of(dataset)
        if size is None and not (dataset is datasets.train and has_own_order(dataset)):
            raise UserError(
                f"task {config.task}: the {name} data has no length: {type(dataset).__name__} "
                "needs __len__, the number of samples of an epoch"
            )
        if size == 0:
            raise UserError(f"task {config.task}: the {name} data has no samples")
    workers = config.loader.workers
    if workers > 1 and has_own_order(datasets.train):
        notes.append(
            f"loader.workers {workers}: one process reads ahead, because each would have to read "
            "all samples of the iterable dataset"
        )
    return datasets._replace(notes=notes)


def _refuse_other_objects(dataset: object, name: str) -> None:
    """Raise UserError for a dictionary of datasets, a generator, or another iterator of Python."""
    kind = type(dataset)
    if isinstance(dataset, Mapping) and dataset and 0 not in dataset:
        keys = [str(key) for key in dataset]
        raise UserError(
            f"the {name} data is a {kind.__name__} of datasets ({', '.join(keys)}): give one of "
            f"them, such as dataset[{keys[0]!r}]"
        )
    if isinstance(dataset, Iterator) and kind.__module__ in ("builtins", "itertools"):
        raise UserError(
            f"the {name} data is a {kind.__name__}, which can be read only once: give a list of "
            "samples, or a dataset with __len__ and __getitem__"
        )


def _refuse_loaders(dataset: object, name: str) -> None:
    """Raise UserError for a DataLoader; one of torchdata without batches is a stream of samples."""
    if not isinstance(dataset, DataLoader):
        return
    divided = isinstance(getattr(dataset, "sampler", None), DistributedSampler)
    if has_state(dataset) and dataset.batch_sampler is None and not divided:
        return
    raise UserError(
        f"the {name} data is a {type(dataset).__name__}, not a dataset of samples: give its "
        ".dataset. batch.global_size and batch.micro_size set the batches, and hvdtrain "
        "shuffles the samples and divides them among the ranks, without a DistributedSampler"
    )


def _check_batches(dataset: object, name: str) -> list[str]:
    """Return lines about batches in a pipeline; raise UserError if they are its samples."""
    found = batches_of(dataset)
    if found is None:
        return []
    if found.certain:
        raise UserError(
            f"the {name} data yields batches, each of which would count as one sample: leave "
            f"{found.maker} out, because batch.global_size and batch.micro_size set the batches"
        )
    return [
        f"the {name} data has a stage that makes batches ({found.maker}): each sample that it "
        "yields counts as one of batch.global_size"
    ]
