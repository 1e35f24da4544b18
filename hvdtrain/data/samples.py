"""Reading of the numbers that describe samples, see sample_facts.py."""

from __future__ import annotations

import hashlib
import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.config import LoaderConfig
from hvdtrain.data.loader import Loading, load, read_samples
from hvdtrain.data.sample_facts import SampleFacts, Values
from hvdtrain.errors import EXIT_USER
from hvdtrain.runtime.collectives import AgreedError, broadcast_json, gather_json
from hvdtrain.runtime.device import random_numbers_kept, seed_all
from hvdtrain.runtime.mesh import Topology

# The checks at a start read this many samples, fewer if they take longer than the time.
_MOST_SAMPLES, _LEAST_SAMPLES, _SECONDS = 8, 3, 0.1
_MOST_VALUES = 16  # of a sample
_DEPTH = 4
# A value with more elements is compared up to rounding, of which decoders are not free.
_EXACT_ELEMENTS = 64
_MOST_ELEMENTS = 1 << 20
_ARRAYS = ("__array__", "__array_interface__")  # arrays, their scalars, and images
_SMALL = 1e-3  # smaller numbers count by their difference, larger ones by their ratio


def facts_of(dataset: Dataset[Any], seed: int, config: LoaderConfig) -> SampleFacts:
    """Read some samples of a map-style dataset: the first, the last, some between; about 0.1 s.

    With loader.workers they are read in a process of their own, as in training: a dataset that
    opens its file at the first access must not open it in the process whose copies the workers are.
    A sample that cannot be read is left out: training may never reach it.

    Args:
        seed: of the random numbers that the samples may use; the generators keep their states.
    """
    few = Loading(replace(config, workers=min(config.workers, 1)))
    with random_numbers_kept():  # a DataLoader draws one, too
        [found] = load(_Reads(dataset, seed), [0], few)
    facts: SampleFacts = found
    return facts


def values_of(sample: Any) -> Values:
    """The numbers of a sample: of its tensors, arrays, images, numbers and texts, in collections
    and attributes. Other objects are left out. Equal samples have equal numbers; different values
    differ by more than the tolerance, with a probability of 0.999.
    """
    found: Values = {}
    for place, value in _leaves(sample, "", _DEPTH):
        if len(found) == _MOST_VALUES:
            break
        found[place] = value
    return found


def open_files(dataset: object) -> list[str]:
    """Names of the dataset's attributes that are open files, such as "dataset.archive.fp".

    Processes that are forked later share them, and the position in them.
    """
    found, waiting, seen = [], [("dataset", dataset, _DEPTH)], {id(dataset)}
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, io.IOBase) and _has_descriptor(value):
            found.append(name)
        elif depth and not isinstance(value, io.IOBase):
            for attribute, inner in getattr(value, "__dict__", {}).items():
                if id(inner) not in seen:
                    seen.add(id(inner))
                    waiting.append((f"{name}.{attribute}", inner, depth - 1))
    return found


def _has_descriptor(file: io.IOBase) -> bool:
    try:
        return not file.closed and file.fileno() >= 0
    except (OSError, ValueError):  # in memory
        return False


def require_same_samples(facts: SampleFacts, topology: Topology) -> None:
    """Compare samples that every rank has read; every rank calls it.

    Raises:
        AgreedError: a rank has read other samples than rank 0.
    """
    expected = SampleFacts.from_json(broadcast_json(facts.to_json(), "samples.expected"))
    for rank, place in enumerate(gather_json(facts.differs_from(expected), "samples.compared")):
        if place:
            raise AgreedError(
                f"rank 0 on {topology.hosts[0]} and rank {rank} on {topology.hosts[rank]} read "
                f"different samples: {place} of the run. Every rank must read the same: give a "
                "shuffle a seed, and do not divide the data among ranks (no DistributedSampler, no "
                "split_dataset_by_node), because hvdtrain does",
                EXIT_USER,
                rank=0,
            )


class _Reads(Dataset[Any]):
    """One item: the facts of a dataset, read where its samples are read."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, index: int) -> SampleFacts:
        facts, began = SampleFacts(), time.perf_counter()
        for number in _numbers(len(self._dataset)):  # type: ignore[arg-type]
            late = time.perf_counter() - began > _SECONDS
            if late and len(facts.fixed) >= _LEAST_SAMPLES:
                break
            self._add(number, facts)
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
            if again.get(place) != value:
                if place not in facts.unseeded:
                    facts.unseeded.append(place)
            elif other.get(place) == value:
                fixed[place] = value
            else:
                seeded[place] = value
        if seeded:
            facts.seeded[str(number)] = seeded

    def _read(self, number: int, seed: int) -> Values:
        seed_all(seed, number)
        [sample] = read_samples(self._dataset, [number])
        return values_of(sample)


def _numbers(size: int) -> list[int]:
    """The first and the last sample, then those that halve the rest."""
    found = dict.fromkeys([0, size - 1])
    parts = 2
    while len(found) < min(_MOST_SAMPLES, size) and parts <= 2 * size:
        found |= dict.fromkeys(size * part // parts for part in range(1, parts, 2))
        parts *= 2
    return [*found][:_MOST_SAMPLES]


def _leaves(value: Any, place: str, depth: int) -> Iterator[tuple[str, float]]:
    if value is None or isinstance(value, bool | int | str | bytes):
        yield place, _hashed(f"{type(value).__name__} {value!r}")
    elif isinstance(value, Tensor | float) or any(hasattr(value, name) for name in _ARRAYS):
        number = _of_array(value)
        if number is not None:
            yield place, number
    elif depth and isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from _leaves(value[key], f"{place}[{key!r}]", depth - 1)
    elif depth and isinstance(value, Sequence):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{place}[{number}]", depth - 1)
    elif depth:
        for name, item in sorted(getattr(value, "__dict__", {}).items()):
            yield from _leaves(item, f"{place}.{name}", depth - 1)


def _of_array(value: Any) -> float | None:
    """A number between -1 and about 80 for a tensor, an array or an image; None: of no such kind.

    It consists of a hash of dtype and shape, the logarithm of the mean magnitude, and a weighted
    mean.
    """
    try:
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(
            np.array(value)  # a copy: images and memory maps are read-only
        )  # fmt: skip
        kind = _hashed(f"{tensor.dtype} {[*tensor.shape]}")
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        flat = tensor.to_dense().reshape(-1)[:_MOST_ELEMENTS]
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return None
    if flat.numel() <= _EXACT_ELEMENTS and not flat.is_floating_point():
        return _hashed(f"{kind} {flat.tolist()}")
    numbers = torch.nan_to_num(flat.double(), nan=0.0, posinf=1e30, neginf=-1e30)
    magnitude = float(numbers.abs().mean()) if len(numbers) else 0.0
    # The multiples of an irrational number, modulo 1, are spread evenly.
    weights = torch.arange(len(numbers), dtype=torch.float64).mul_(0.7548776662466927).frac_()
    weighted = float(numbers @ (weights - 0.5)) / max(len(numbers), 1)
    return kind + math.log1p(magnitude / _SMALL) + weighted / max(magnitude, _SMALL)


def _hashed(text: str) -> float:
    """A number from 0 to 1."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "little") / (1 << 48)
