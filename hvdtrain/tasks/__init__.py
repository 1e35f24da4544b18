"""Tasks: definitions of the model, the data and the loss, independent of ranks.

This module does not import torch, so that a built-in task's configuration can be checked before
torch is loaded.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

ENTRY_POINTS = "hvdtrain.tasks"
BUILT_IN = {
    "language_model": "hvdtrain.tasks.language_model:LanguageModel",
    "image": "hvdtrain.tasks.image:Image",
    "huggingface": "hvdtrain.tasks.huggingface:HuggingFace",
    "tabular": "hvdtrain.tasks.tabular:Tabular",
}


class Datasets(NamedTuple):
    """The data of a task; `validation` may be None.

    Map-style: `len(d)` samples, `d[i]` is one. Or torch's IterableDataset with its own order:
    `iter(d)` yields `len(d)` samples, the same on every rank; `set_epoch(epoch)`, if defined, is
    called before each pass over the training data. If it has `state_dict()` and
    `load_state_dict()`, its state is saved with the run's, and its length may be unknown; see
    docs/custom-tasks.md.

    Map-style training data may have `shard_samples`, the number of samples of each shard, for
    loader.order sequential; or be a hvdtrain.data.mixture.Mixture of such datasets.

    `fingerprint` changes when the training data does; a resumed run refuses other data. `notes`
    are logged once at the beginning of a run, such as how many rows were left out. `format` is a
    name for the format of the data, which manifest.json records.
    """

    train: Dataset[Any]
    validation: Dataset[Any] | None = None
    fingerprint: str | None = None
    notes: Sequence[str] = ()
    format: str | None = None


class Task(Protocol):
    """Interface of a user's own task.

    A class with the methods below. Attributes in `OPTIONAL` may be omitted:
    `Config` is a dataclass whose fields become keys of the configuration, passed to the
    constructor; `defaults` maps keys such as "train.duration" to this task's defaults;
    `metrics` names the values that `loss` returns besides "loss", and `validation_metrics` those
    that it returns in addition if `model.training` is false; `derived(means)` computes further
    metrics of an evaluation from the means of all these; `units` says what a sample counts as, such
    as ("tokens", 128); `sample` shows example output of the trained model; `param_groups(model)`
    returns the optimizer's groups: dicts of "params", and "lr_scale" (times the learning rate) and
    "weight_decay" (default: optim.weight_decay) if they differ; `blocks(model)` returns the
    repeated modules, for compile (default: the modules of the largest nn.ModuleList);
    `collate(samples)` makes a batch of a list of samples (default: torch's default_collate);
    `measures(rows)` computes an evaluation's metrics that are not means, by name, such as an AUC.
    Its argument contains the "rows" that `loss` returned, for all samples and ranks in the order of
    the data, (samples, ...) float64 on the CPU. `optimizer(model)` returns the optimizer (default:
    that of optim.name), and `schedule(step)` the learning rate of a step, from 0, or None to leave
    it to the optimizer (default: that of schedule.name). `callbacks()` returns a list of objects
    whose `on_step(record)` is called after each step, see docs/custom-tasks.md.
    """

    OPTIONAL: ClassVar[Mapping[str, Any]] = {
        "Config": None, "defaults": {}, "metrics": (), "validation_metrics": (), "derived": None,
        "measures": None, "units": None, "sample": None, "param_groups": None, "blocks": None,
        "collate": None, "optimizer": None, "schedule": None, "callbacks": None,
        "script_state": None, "run_name": None,
    }  # fmt: skip

    def datasets(self) -> Datasets:
        """The data; called once, before `model`. Every rank must return the same data."""
        ...

    def model(self) -> nn.Module:
        """The model on the CPU, freshly initialized; the seed is set before the call."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Loss of a micro-batch: "loss", and one value for each of `metrics`.

        A value is a scalar tensor, the mean over the samples; or (sum, weight), scalar tensors or
        numbers: the mean over the global batch is then the sum of sums over the sum of weights. A
        value must have the same form for all micro-batches. With `measures`, also return "rows": a
        tensor with a row for each sample, used only in evaluation.
        """
        ...


def optional(task: Any, name: str) -> Any:
    """An optional attribute of a task (class or object), or its default."""
    return getattr(task, name, Task.OPTIONAL[name])


def installed() -> dict[str, str]:
    """Return name -> package.module:Class of the built-in tasks and those of installed packages.

    A package registers its tasks as entry points of the group "hvdtrain.tasks". They cannot replace
    a built-in task.
    """
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    return {
        **BUILT_IN,
        **{name: path for name, path in sorted(found.items()) if name not in BUILT_IN},
    }


def load_class(name: str) -> type:
    """The class of a task.

    Args:
        name: name of a built-in or installed task, or `package.module:Class`.

    Raises:
        UserError: there is no such task.
    """
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        path = installed().get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise UserError(
            f"task: no task is called {name!r}; there are {', '.join(installed())}; "
            "your own is given as package.module:Class"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # the module exists, but one of its imports is missing
        raise UserError(
            f"task: no module {error.name!r} for {name!r}; is it on PYTHONPATH?"
        ) from None
    if not hasattr(module, class_name):
        raise UserError(f"task: module {module_name!r} has no class {class_name!r}")
    task = getattr(module, class_name)
    missing = [m for m in ("datasets", "model", "loss") if not callable(getattr(task, m, None))]
    if missing:
        raise UserError(f"task: {name} has no method {', '.join(missing)}")
    config = optional(task, "Config")
    if config is not None and not is_dataclass(config):
        raise UserError(f"task: {name}.Config must be a dataclass")
    _check_init(task, name, takes_config=config is not None)
    return task


def _check_init(task: type, name: str, takes_config: bool) -> None:
    try:
        signature = inspect.signature(task, follow_wrapped=False)
    except ValueError:
        return  # a built-in base class without a signature
    try:
        signature.bind(*([None] if takes_config else []))
    except TypeError as error:
        what, fix = "has no Config", "write it without, or add a dataclass called Config"
        if takes_config:
            what, fix = "has a Config", "write `def __init__(self, config)`"
        raise UserError(
            f"task: {name} {what}, which its __init__{signature} does not match ({error}); {fix}"
        ) from None


# --- what a task leaves to defaults -------------------------------------------


def collate_of(task: Task) -> Callable[[list[Any]], Any]:
    """The function that makes a batch of samples."""
    from torch.utils.data import default_collate

    return optional(task, "collate") or default_collate


def first_batch(task: Task, dataset: Dataset[Any], samples: int) -> Any:
    """A batch of the first samples, which are repeated if there are too few."""
    size = len(dataset)  # type: ignore[arg-type]
    return collate_of(task)([dataset[i % size] for i in range(samples)])


def blocks_of(task: Any, model: nn.Module) -> list[nn.Module]:
    """The repeated modules of a model: of `Task.blocks`, or else of the largest nn.ModuleList.

    Blocks are compiled one by one; there may be none. The largest list is the one with the most
    parameter elements.

    Raises:
        UserError: the task names something that is not a module of the model.
    """
    from torch import nn

    named = optional(task, "blocks")
    if named is not None:
        blocks = list(named(model))
        modules = set(model.modules())
        foreign = [block for block in blocks if block not in modules]
        if foreign:
            raise UserError(
                f"the task's blocks(model) has a {type(foreign[0]).__name__} that is not "
                "a module of the model"
            )
        return blocks
    lists: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, nn.ModuleList)
    ]
    largest = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
    return list(largest.children()) if largest is not None else []
