"""Pipelines that yield batches, each of which counts as one sample.

Pipelines of webdataset, torchdata, torch and Hugging Face keep their stages in attributes. Only
what a library's own stage does is known: a function or a dataset of the user may divide a batch
again, or make one sample of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, default_collate

_LIBRARIES = ("webdataset.", "torchdata.", "datasets.", "torch.utils.data.")
# By name of a stage's function, or else of its class: none of the libraries need be installed.
_MAKERS = {
    "_batched": ".batched()",  # webdataset
    "Batcher": "Batcher",  # torchdata
    "BatcherIterDataPipe": ".batch()",  # torch
    "_batch_fn": ".batch()",  # Hugging Face
    "_batch_arrow_table": ".batch()",
}
_DIVIDERS = ("_unbatched", "_unlisted", "Unbatcher", "UnBatcherIterDataPipe")
# Stages of webdataset that yield what they read.
_SAME = ("WebDataset", "WebLoader", "DataPipeline", "DataLoader", "_shuffle", "detshuffle")
_COLLATIONS = ("default_collation_fn", "default_collate")
# Attributes with what a stage reads.
_SOURCES = ("root", "source", "datapipe", "_ex_iterable", "ex_iterable", "dataset")


class Batches(NamedTuple):
    """What makes batches.

    Args:
        maker: as users write it, such as ".batched()".
        certain: whether the samples are collated batches; else something else may follow.
    """

    maker: str
    certain: bool


def batches_of(dataset: object) -> Batches | None:
    """The last stage of a pipeline that makes batches; None: none is known, or they are divided."""
    certain = True
    for stage in _stages(dataset):
        if isinstance(stage, DataLoader) and stage.batch_sampler is not None:
            return Batches("WebLoader", certain)
        name = _library_name(stage)
        if name in _MAKERS:
            return Batches(_MAKERS[name], certain and _collates(stage))
        if name in _DIVIDERS or _own(stage).get("batched") is True:  # a map of Hugging Face
            return None
        certain = certain and name in _SAME
    return None


def _stages(stage: Any) -> Iterator[Any]:
    """A pipeline and its stages, the last one first; not into a dataset of the user."""
    yield stage
    if not _is_of_a_library(_class_of(stage)):
        return
    own = _own(stage)
    read = own.get("pipeline") or [own[name] for name in _SOURCES if name in own]
    for one in reversed(read):
        yield from _stages(one)


def _own(stage: Any) -> dict[str, Any]:
    """Attributes, without calling a __getattr__ of the user."""
    found = getattr(stage, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _library_name(stage: Any) -> str:
    """Name of the library's function in a stage, or of its class; "": it is the user's."""
    own = _own(stage)
    what = own.get("f", own.get("function", _class_of(stage)))
    return getattr(what, "__name__", "") if _is_of_a_library(what) else ""


def _class_of(stage: Any) -> type:
    """The class of a stage; with_length() of webdataset makes a class in the module abc from it."""
    return next(kind for kind in type(stage).__mro__ if kind.__module__ != "abc")


def _is_of_a_library(what: Any) -> bool:
    return f"{getattr(what, '__module__', '')}.".startswith(_LIBRARIES)


def _collates(stage: Any) -> bool:
    """Whether a stage of webdataset stacks samples; another function may make one sample of two."""
    own = _own(stage)
    if "kw" not in own or len(own["args"]) > 1:
        return False
    function = own["kw"].get("collation_fn", default_collate)
    return getattr(function, "__name__", "") in _COLLATIONS
