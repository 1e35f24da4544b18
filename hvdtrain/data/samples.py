"""Reading of the numbers that describe samples, see sample_facts.py."""

from __future__ import annotations

import hashlib
import io
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.config import LoaderConfig
from hvdtrain.data.loader import Loading, load, read_samples
from hvdtrain.data.sample_facts import SampleFacts, Values, described, differ
from hvdtrain.errors import EXIT_USER
from hvdtrain.log import logger
from hvdtrain.runtime.collectives import AgreedError, broadcast_json, gather_json
from hvdtrain.runtime.device import random_numbers_kept, seed_all
from hvdtrain.runtime.mesh import Topology

_SLOW_SECONDS = 0.5  # for the first sample: then it is the only one
_COMPARED_VALUES = 16  # of a sample
_DEPTH = 4
# Decoders round differently. Larger values of other types are numbers that must not differ.
_APPROXIMATE = (torch.uint8, torch.int16)
_MOST_ELEMENTS = 1 << 20
_MOST_BYTES = 1 << 26  # of arrays that are read when they are looked at, such as of HDF5
_ARRAYS = ("__array__", "__array_interface__")  # arrays, their scalars, and images
_SMALL = 1e-3  # smaller numbers count by their difference, larger ones by their ratio
# Two single elements, at these places of all, may differ by 5% of the mean magnitude.
_PLACES, _ELEMENT_SCALE = (0.382, 0.711), 3e-4 / 0.05
_OBJECTS = 1000  # of a dataset, to look into
_Set = Callable[[Any], object]


def facts_of(dataset: Dataset[Any], seed: int, config: LoaderConfig) -> SampleFacts:
    """Read 4 samples of a map-style dataset three times: the first, the last, two between.

    With loader.workers they are read in a process of their own, as in training: a dataset that
    opens its file at the first access must not open it in the process whose copies the workers are.
    A sample that cannot be read is left out: training may never reach it.

    Args:
        seed: of the random numbers that the samples may use; the generators keep their states.
    """
    few = Loading(replace(config, workers=min(config.workers, 1)))
    with random_numbers_kept(), _own_generators_kept(dataset):  # a DataLoader draws one, too
        [found] = load(_Reads(dataset, seed), [0], few)
    facts: SampleFacts = found
    return facts


def values_of(sample: Any) -> Values:
    """The numbers of a sample: of its tensors, arrays, images, numbers and texts, in collections
    and dataclasses. Other objects are left out. Equal samples have equal numbers; if values differ,
    so do their numbers, with a probability of 0.99.
    """
    found: Values = {}
    for place, value in _leaves(sample, "", _DEPTH):
        if len(found) >= _COMPARED_VALUES:
            break
        found[place] = value
    return found


def open_files(dataset: object) -> list[str]:
    """Names of the dataset's attributes that are open files, such as "dataset.archive.fp".

    Processes that are forked later share them, and the position in them.
    """
    found = [(name, value) for name, value in parts_of(dataset) if isinstance(value, io.IOBase)]
    return [name for name, file in found if _is_read_from_disk(file)]


def parts_of(dataset: object) -> Iterator[tuple[str, object]]:
    """The dataset and the objects in its attributes, lists and dicts, in depth, with their names.

    At most 1,000 objects: a list of samples is not looked into.
    """
    waiting, seen = [("dataset", dataset, 2 * _DEPTH)], {id(dataset)}
    for name, value, depth in waiting:
        yield name, value
        inner: list[tuple[str, Any]] = []
        if type(value) is dict and len(value) < _OBJECTS:  # others may read files
            inner = [(f"{name}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, list | tuple) and len(value) < _OBJECTS:
            inner = [(f"{name}[{number}]", item) for number, item in enumerate(value)]
        elif not isinstance(value, io.IOBase | ModuleType | type):
            inner = [(f"{name}.{key}", item) for key, item in _attributes(value).items()]
        for place, item in inner if depth else ():
            if id(item) not in seen and len(seen) < _OBJECTS and not isinstance(item, _PLAIN):
                seen.add(id(item))
                waiting.append((place, item, depth - 1))


_PLAIN = (str, bytes, int, float, Tensor, np.ndarray, type(None))


def _attributes(value: object) -> dict[str, Any]:
    try:
        found = getattr(value, "__dict__", None)
    except Exception:  # of a property
        return {}
    return found if isinstance(found, dict) else {}


def _is_read_from_disk(file: io.IOBase) -> bool:
    try:
        return not file.closed and file.readable() and file.fileno() > 2
    except (OSError, ValueError):  # in memory
        return False


@contextmanager
def _own_generators_kept(dataset: object) -> Iterator[None]:
    """Restore the generators among a dataset's attributes to their states before the context."""
    kept: list[tuple[_Set, Any]] = []
    for _, one in parts_of(dataset):
        if isinstance(one, torch.Generator | np.random.RandomState):
            kept.append((one.set_state, one.get_state()))
        elif isinstance(one, np.random.Generator):
            bits = one.bit_generator
            kept.append((partial(setattr, bits, "state"), bits.state))
        elif isinstance(one, random.Random) and not isinstance(one, random.SystemRandom):
            kept.append((one.setstate, one.getstate()))
    try:
        yield
    finally:
        for set_state, state in kept:
            set_state(state)


def require_same_samples(facts: SampleFacts, topology: Topology) -> None:
    """Compare samples of a stream that every rank has read; every rank calls it.

    If integers and texts are the same, and something that is not the same in all samples is, the
    ranks have read the same samples, and the rest draws random numbers of its own: a warning.

    Raises:
        AgreedError: a rank has read other samples than rank 0.
    """
    expected = SampleFacts.from_json(broadcast_json(facts.to_json(), "samples.expected"))
    found = facts.differences(expected)
    exact = [one for one in found if facts.fixed[one[0]][one[1]] < 0]
    refused = found and (exact or not _agree_somewhere(facts, {place for _, place in found}))
    own = [refused and described(*(exact or found)[0]), found and described(*found[0])]
    gathered = gather_json([one or "" for one in own], "samples.compared")
    for rank, (place, _) in enumerate(gathered):
        if place:
            raise AgreedError(
                f"rank 0 on {topology.hosts[0]} and rank {rank} on {topology.hosts[rank]} read "
                f"different samples: {place} of the run. Every rank must read the same: give a "
                "shuffle a seed, and do not divide the data among ranks (no DistributedSampler, no "
                "split_dataset_by_node), because hvdtrain does",
                EXIT_USER,
                rank=0,
            )
    places = [place for _, place in gathered if place]
    if places and topology.rank == 0:
        logger.warning(UNSEEDED, places[0])


UNSEEDED = (
    "%s of the training data differs each time it is read: the dataset draws random numbers of its "
    "own, so the curve cannot be reproduced. For a sample, use the global generators of torch, "
    "NumPy or Python, which are seeded for each micro-batch"
)


def _agree_somewhere(facts: SampleFacts, differing: set[str]) -> bool:
    """Whether another place identifies the samples: its values are not all the same."""
    samples = [*facts.fixed.values()]
    return any(
        len({values.get(place) for values in samples}) > 1
        for place in samples[0].keys() - differing
    )


class _Reads(Dataset[Any]):
    """One item: the facts of a dataset, read where its samples are read."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, index: int) -> SampleFacts:
        facts, began = SampleFacts(), time.perf_counter()
        size = len(self._dataset)  # type: ignore[arg-type]
        for number in dict.fromkeys([0, size - 1, size // 2, size // 4]):
            self._add(number, facts)
            if time.perf_counter() - began > _SLOW_SECONDS:
                break
        return facts

    def _add(self, number: int, facts: SampleFacts) -> None:
        try:
            first, other, again = (
                self._read(number, seed) for seed in (self._seed, self._seed + 1, self._seed)
            )
        except Exception:  # whatever a dataset raises: training says so if it reads this sample
            return
        fixed, seeded = facts.fixed.setdefault(str(number), {}), Values()
        for place, value in first.items():
            if differ(again.get(place, value), value):
                if place not in facts.unseeded:
                    facts.unseeded.append(place)
            elif differ(other.get(place, value), value):
                seeded[place] = value
            else:
                fixed[place] = value
        if seeded:
            facts.seeded[str(number)] = seeded

    def _read(self, number: int, seed: int) -> Values:
        seed_all(seed, number)
        [sample] = read_samples(self._dataset, [number])
        return values_of(sample)


def _leaves(value: Any, place: str, depth: int) -> Iterator[tuple[str, float]]:
    if isinstance(value, str) and value.startswith("/"):
        value = value.rpartition("/")[2]  # hosts and jobs have directories of their own
    if value is None or isinstance(value, bool | int | str | bytes):
        yield place, _exact(f"{value!r}")
    elif isinstance(value, Tensor | float) or any(hasattr(value, name) for name in _ARRAYS):
        yield from ((place + part, number) for part, number in _of_array(value))
    elif isinstance(value, Mapping) and depth:
        for key in sorted(value, key=repr):
            yield from _leaves(value[key], f"{place}[{key!r}]", depth - 1)
    elif isinstance(value, Sequence) and all(type(item) in (int, float) for item in value):
        yield from ((place + part, number) for part, number in _of_array(np.array(value)))
    elif isinstance(value, Sequence) and depth:
        for number, item in enumerate(value):
            yield from _leaves(item, f"{place}[{number}]", depth - 1)
    elif is_dataclass(value) and depth:
        for name, item in _attributes(value).items():
            yield from _leaves(item, f"{place}.{name}", depth - 1)


def _of_array(value: Any) -> list[tuple[str, float]]:
    """Numbers of a tensor, an array or an image, with suffixes of the place; [] for other kinds."""
    try:
        flat, shape = _flat(value)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return []
    if not flat.is_floating_point() and (flat.dtype not in _APPROXIMATE or flat.numel() <= 1):
        content = flat.long().numpy().tobytes() if flat.numel() > 1 else repr(flat.tolist())
        return [("", _exact(f"{shape} {content!r}" if shape else f"{flat.item()!r}"))]
    numbers = torch.nan_to_num(flat.double(), nan=0.0, posinf=1e30, neginf=-1e30)
    if not len(numbers):
        return [("", _exact(f"{shape}"))]
    magnitude = float(numbers.abs().mean())
    # The multiples of an irrational number, modulo 1, are spread evenly.
    weights = torch.arange(len(numbers), dtype=torch.float64).mul_(0.7548776662466927).frac_()
    scale = max(magnitude, _SMALL)
    whole = (
        math.log1p(magnitude / _SMALL) + float((numbers @ (weights - 0.5)) / len(numbers)) / scale
    )
    # The shape and the additive constants keep approximate values positive.
    found = [("", 1.0 - _exact(f"{shape}") + whole)]
    if len(numbers) > 1:
        for part, at in enumerate(_PLACES, 1):
            element = float(numbers[int(at * len(numbers))]) / scale
            found.append((f"~{part}", max(1.0 + element * _ELEMENT_SCALE, 0.0)))
    return found


def _flat(value: Any) -> tuple[Tensor, list[int]]:
    """The first elements on the CPU, 1-d, and the shape."""
    if isinstance(value, Tensor):
        shape, tensor = [*value.shape], value.detach()
        if tensor.layout is not torch.strided:
            coo = tensor.to_sparse_coo().coalesce()
            tensor = torch.cat([coo.indices().flatten().double(), coo.values().flatten().double()])
    else:
        if not isinstance(value, np.ndarray) and getattr(value, "nbytes", 0) > _MOST_BYTES:
            raise ValueError("it may be a file")
        array = np.asarray(value)
        shape = [*array.shape]
        tensor = torch.from_numpy(array.reshape(-1)[:_MOST_ELEMENTS].copy())
    tensor = tensor.reshape(-1)[:_MOST_ELEMENTS].cpu()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten(), shape


def _exact(text: str) -> float:
    """A number from -2 to -1 that differs for different texts."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return -1.0 - int.from_bytes(digest[:6], "little") / (1 << 48)
