"""A task says what is trained: the model, the data, the loss. It knows nothing of ranks.

This module imports no torch, so that a built-in task's configuration can be
checked before torch is loaded.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

BUILT_IN = {
    "language_model": "hvdtrain.tasks.language_model:LanguageModel",
    "image": "hvdtrain.tasks.image:Image",
    "huggingface": "hvdtrain.tasks.huggingface:HuggingFace",
    "tabular": "hvdtrain.tasks.tabular:Tabular",
}


class Datasets(NamedTuple):
    """Data sets of known length; `validation` may be None.

    Map-style: `len(d)` samples, `d[i]` is one. Or torch's IterableDataset, whose order is its own:
    `iter(d)` gives `len(d)` samples, the same on every rank; its `set_epoch(epoch)`, if it has
    one, is called before each pass over the training data.

    `fingerprint` changes when the training data does; a resumed run refuses other data. `notes`
    are said once at a run's beginning, such as how many rows were left out.
    """

    train: Dataset[Any]
    validation: Dataset[Any] | None = None
    fingerprint: str | None = None
    notes: Sequence[str] = ()


class Task(Protocol):
    """What a user writes to train something of their own.

    A class with the methods below. What stands in `OPTIONAL` may be left out:
    `Config` is a dataclass whose fields become keys of the configuration, given to the
    constructor; `defaults` maps keys such as "train.steps" to this task's defaults;
    `metrics` names what `loss` returns beside "loss", and `validation_metrics` what it returns
    beside these where `model.training` is false; `derived(means)` gives further figures of an
    evaluation from the means of all these; `units` says what a sample counts as, such as
    ("tokens", 128); `sample` shows the trained model at work; `param_groups(model)` gives the
    optimizer's groups: dicts of "params", and "lr_scale" (times the learning rate) and
    "weight_decay" (default: optim.weight_decay) where they differ; `blocks(model)` names the
    modules that it repeats, for compile.enabled (default: those of the largest nn.ModuleList);
    `collate(samples)` makes a batch of a list of samples (default: torch's default_collate);
    `measures(rows)` gives an evaluation's figures that are no means, by name, such as an AUC: of
    the "rows" that `loss` returned for each micro-batch, here those of all samples and ranks in
    the order of the data, (samples, ...) float64 on the CPU.
    """

    OPTIONAL: ClassVar[Mapping[str, Any]] = {
        "Config": None, "defaults": {}, "metrics": (), "validation_metrics": (), "derived": None,
        "measures": None, "units": None, "sample": None, "param_groups": None, "blocks": None,
        "collate": None,
    }  # fmt: skip

    def datasets(self) -> Datasets:
        """The data; called once, before `model`. Every rank must see the same."""
        ...

    def model(self) -> nn.Module:
        """The model on the CPU, freshly initialised; the seed is set before the call."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Of a micro-batch: "loss", and one value for each of `metrics`.

        A value is a scalar tensor, the mean over the samples; or (sum, weight), scalar tensors or
        numbers: the mean over the global batch is the sum of sums over the sum of weights. A
        value comes in the same form from all micro-batches. With `measures` also "rows": a
        tensor with a row for each sample; it counts in evaluation only.
        """
        ...


def optional(task: Any, name: str) -> Any:
    """An optional attribute of a task (class or object), or what stands for it."""
    return getattr(task, name, Task.OPTIONAL[name])


def load_class(name: str) -> type:
    """The class of a task.

    Args:
        name: a built-in task's name, or `package.module:Class`.

    Raises:
        UserError: there is no such task.
    """
    path = BUILT_IN.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise UserError(
            f"task: no task is called {name!r}; built in: {', '.join(BUILT_IN)}; "
            "your own is given as package.module:Class"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # the module is there; something that it imports is not
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
        return  # of a built-in base class, which has none
    try:
        signature.bind(*([None] if takes_config else []))
    except TypeError as error:
        what, fix = "has no Config", "write it without, or add a dataclass called Config"
        if takes_config:
            what, fix = "has a Config", "write `def __init__(self, config)`"
        raise UserError(
            f"task: {name} {what}, which its __init__{signature} does not match ({error}); {fix}"
        ) from None
