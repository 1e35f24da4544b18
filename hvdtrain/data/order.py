"""The order of samples, computed from the seed and the position; nothing is stored.

An order assigns a sample of the dataset to each position of a run. There are four:

- ShuffledOrder: position p of a run belongs to epoch p // n and is the sample permutation(p % n) of
  that epoch. The permutation is a Feistel network over the smallest power of two that holds n, with
  cycle-walking: a result outside 0..n-1 is passed through the network again until it is inside
  (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Any position is computed in
  constant time and memory. A dataset of 10^9 samples therefore costs a rank as much as one of ten,
  and any number of ranks can share the work.
- SequentialOrder: shard after shard, shuffled within windows, so that each rank reads contiguous
  runs of samples.
- TorchOrder: the order of torch's own samplers, for runs that another trainer began.
- MixedOrder: several sources in given proportions, each in an order of its own.

A specification describes an order as JSON, without the seed and the global batch. The loader and
the audit build orders from it: the audit reads it from the files of the run.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.config import MOST_BUFFER, MOST_COUNTS, PERIOD, SOURCE_NAME, LoaderConfig
from hvdtrain.errors import UserError
from hvdtrain.untrusted import is_of, shown

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

# Eight rounds: twice the number that a pseudo-random permutation needs in theory (Luby and Rackoff,
# 1988).
_ROUNDS = 8
_MASK64 = (1 << 64) - 1
_STEP64 = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(words: _Words) -> _Words:
    """Pseudo-random 64-bit words from counters (Steele, Lea and Flood, 2014)."""
    return _mix(words + _STEP64)


def _mix(words: _Words) -> _Words:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> _Words:
    start = np.array([seed & _MASK64], dtype=np.uint64)
    key = _mix(splitmix64(start) ^ np.uint64(epoch & _MASK64))
    steps = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _STEP64
    return _mix(key + steps)


def permute(positions: Indices, size: int, seed: int, epoch: int) -> Indices:
    """Sample indices at `positions` of one epoch.

    Args:
        positions: int64, each in [0, size).
        size: number of samples, >= 1.
        seed: any integer.
        epoch: >= 0.

    Returns:
        int64 of the same shape; over all positions a permutation of 0..size-1.
    """
    if size == 1:
        return np.zeros_like(positions)
    bits = (size - 1).bit_length()
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    keys = _round_keys(seed, epoch)

    def network(words: _Words) -> _Words:
        high, low = words >> low_bits, words & low_mask
        for i in range(0, _ROUNDS, 2):
            high = high ^ (_mix(low + keys[i]) & high_mask)
            low = low ^ (_mix(high + keys[i + 1]) & low_mask)
        return (high << low_bits) | low

    words = network(positions.astype(np.uint64))
    outside = words >= size
    while outside.any():
        words[outside] = network(words[outside])
        outside = words >= size
    return words.astype(np.int64)


def sample_order(start: int, stop: int, size: int, seed: int) -> Indices:
    """Sample indices at the positions start..stop-1 of a run, across epochs.

    Args:
        start, stop: positions since the run's first sample, 0 <= start <= stop.
        size: number of samples in the dataset, >= 1.
        seed: the run's seed.

    Returns:
        int64 of shape (stop - start,).
    """
    parts = []
    while start < stop:
        epoch, first = divmod(start, size)
        last = min(size, first + stop - start)
        parts.append(permute(np.arange(first, last, dtype=np.int64), size, seed, epoch))
        start += last - first
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _range(start: int, stop: int) -> Indices:
    return np.arange(start, stop, dtype=np.int64)


class Order(Protocol):
    """Assigns a sample to each position of a run, across epochs.

    Attributes:
        size: samples in an epoch.
    """

    size: int

    def samples(self, start: int, stop: int) -> Indices:
        """Sample indices at the positions start..stop-1, int64 of shape (stop - start,)."""


class ShuffledOrder:
    """A permutation of all samples in each epoch; see `sample_order`."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._seed = seed

    def samples(self, start: int, stop: int) -> Indices:
        """See Order."""
        return sample_order(start, stop, self.size, self._seed)


class TorchOrder:
    """Each epoch is `torch.randperm` of all samples, seeded by the seed and the epoch.

    It is the order in which the ranks of torch's DistributedSampler together visit the samples, and
    that of the Trainer of transformers, with the same seed. An epoch's permutation is kept in
    memory, as they do: 8 bytes per sample.

    Args:
        seed: added to the number of the epoch.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._seed = seed
        self._kept = -1, np.empty(0, dtype=np.int64)

    def samples(self, start: int, stop: int) -> Indices:
        """See Order."""
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            epoch, first = divmod(start, self.size)
            parts.append(self._permutation(epoch)[first : first + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> Indices:
        if self._kept[0] != epoch:
            import torch  # the audit reads other orders without it

            # A seed of torch has 64 bits, and may not be less than -2**63.
            generator = torch.Generator().manual_seed((self._seed + epoch) & _MASK64)
            self._kept = epoch, torch.randperm(self.size, generator=generator).numpy()
        return self._kept[1]


class SequentialOrder:
    """Shard after shard, shuffled within windows of consecutive samples.

    In each epoch the shards are permuted, and the samples of all shards form one stream. A window
    is the next `buffer` samples of the stream; the last window of an epoch may be smaller. The
    places of the global batch divide a window: each place takes one contiguous run of its samples,
    in a random order, in the steps of the window. Neighboring places take neighboring runs, so a
    micro-batch reads a contiguous run, too, whatever rank computes it.

    The cost of a position is that of sorting its window, which is kept for the next positions.

    Args:
        shards: samples of each shard.
        buffer: samples in a window; up to the global batch, a step has consecutive samples.
        seed: any integer.
        global_size: samples in a step of the run.
        positions: (first, stop) -> positions in the run of this order's samples number first to
            stop - 1, where known; default: the same numbers.
    """

    def __init__(
        self,
        shards: Sequence[int] | Indices,
        buffer: int,
        seed: int,
        global_size: int,
        positions: Callable[[int, int], Indices] = _range,
    ) -> None:
        self._shards = np.array(shards, dtype=np.int64)
        self._begins = np.cumsum(self._shards) - self._shards
        self.size = int(self._shards.sum())
        self._buffer = buffer
        self._global_size = global_size
        self._positions = positions
        self._seed = seed
        self._key = splitmix64(np.array([seed & _MASK64], dtype=np.uint64))
        self._kept = (-1, -1), np.empty(0, dtype=np.int64)
        self._epoch = -1, self._shards, self._begins

    def samples(self, start: int, stop: int) -> Indices:
        """See Order."""
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            epoch, at = divmod(start, self.size)
            number, first = divmod(at, self._buffer)
            window = self._window(epoch, number)
            parts.append(window[first : first + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts)

    def _window(self, epoch: int, number: int) -> Indices:
        """Samples at the positions of a window."""
        if self._kept[0] == (epoch, number):
            return self._kept[1]
        first = number * self._buffer
        count = min(self._buffer, self.size - first)
        begin = epoch * self.size + first
        places = self._positions(begin, begin + count) % self._global_size
        random = _mix(_range(begin, begin + count).astype(np.uint64) ^ self._key)
        at = np.empty(count, dtype=np.int64)  # in the window
        at[np.lexsort((random, places))] = _range(0, count)
        found = self._of_stream(first + at, epoch)
        self._kept = (epoch, number), found
        return found

    def _of_stream(self, at: Indices, epoch: int) -> Indices:
        """Samples at positions of an epoch's stream of shards."""
        if self._epoch[0] != epoch:
            count = len(self._shards)
            order = permute(_range(0, count), count, self._seed, epoch)
            self._epoch = epoch, np.cumsum(self._shards[order]), self._begins[order]
        _, ends, begins = self._epoch
        shard = np.searchsorted(ends, at, side="right")
        before = np.where(shard > 0, ends[shard - 1], 0)
        found: Indices = begins[shard] + at - before
        return found


# --- mixtures -----------------------------------------------------------------


def spread(counts: Sequence[int]) -> list[int]:
    """Turns that are spread evenly: each index i of `counts` occurs counts[i] times."""
    turns = sorted(
        ((2 * number + 1) / count, index)
        for index, count in enumerate(counts)
        for number in range(count)
    )
    return [index for _, index in turns]


class Interleaving:
    """Sources in given proportions: each position has a source, and is its n-th sample.

    In a phase, any sum(counts) consecutive positions have exactly `counts` samples of the sources.
    A source continues in the next phase where it was.

    Args:
        phases: (first position, counts of the sources); the first phase begins at 0.
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._starts = [start for start, _ in phases]
        self._turns = [np.array(spread(counts), dtype=np.int64) for _, counts in phases]
        sources = np.arange(len(phases[0][1]))
        # Samples of each source before each position of a period: (period + 1, sources).
        self._within = [
            np.vstack([np.zeros_like(sources), np.cumsum(turns[:, None] == sources, axis=0)])
            for turns in self._turns
        ]
        self._bases = np.zeros((len(phases), len(sources)), dtype=np.int64)  # before each phase
        for phase, (start, stop) in enumerate(pairwise(self._starts)):
            self._bases[phase + 1] = self._bases[phase] + self._in_phase(phase, stop - start)

    def sources(self, start: int, stop: int) -> Indices:
        """Source of each of the positions start..stop-1."""
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            phase = bisect_right(self._starts, start) - 1
            end = min([stop, *self._starts[phase + 1 : phase + 2]])
            begin, turns = self._starts[phase], self._turns[phase]
            parts.append(turns[_range(start - begin, end - begin) % len(turns)])
            start = end
        return np.concatenate(parts)

    def before(self, position: int) -> list[int]:
        """Number of samples of each source before a position."""
        phase = bisect_right(self._starts, position) - 1
        found = self._bases[phase] + self._in_phase(phase, position - self._starts[phase])
        counts: list[int] = found.tolist()
        return counts

    def positions(self, source: int, first: int, stop: int) -> Indices:
        """Positions of a source's samples number first to stop-1, if the phase of `first` lasts.

        They do not depend on later phases, which may still change.
        """
        # A phase without samples of the source has the same base as the next one.
        phase = int(np.searchsorted(self._bases[:, source], first, side="right")) - 1
        numbers = _range(first, stop) - self._bases[phase, source]
        turns = self._turns[phase]
        slots = np.flatnonzero(turns == source)
        found: Indices = self._starts[phase] + numbers // len(slots) * len(turns)
        return found + slots[numbers % len(slots)]

    def _in_phase(self, phase: int, positions: int) -> Indices:
        """Samples of each source in the first positions of a phase."""
        within = self._within[phase]
        periods, rest = divmod(positions, len(within) - 1)
        found: Indices = periods * within[-1] + within[rest]
        return found


def fill(sizes: Sequence[int], shares: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Phases of an Interleaving in which each source gives its `sizes` samples once.

    A source whose samples are used up is left out of the following phases.

    Args:
        shares: proportions of the sources, each > 0.
    """
    phases: list[tuple[int, list[int]]] = []
    left, start = list(sizes), 0
    while any(left):
        counts = [share if n else 0 for share, n in zip(shares, left, strict=True)]
        phase = Interleaving([(0, counts)])
        # The position after the last sample of the first source that is used up.
        length = min(int(phase.positions(i, n - 1, n)[0]) for i, n in enumerate(left) if n) + 1
        phases.append((start, counts))
        left = [n - used for n, used in zip(left, phase.before(length), strict=True)]
        start += length
    return phases


class MixedOrder:
    """Samples of several sources; the sources' samples follow each other in the dataset.

    Args:
        orders: order of each source, by name.
        interleaving: source of each position.

    Attributes:
        orders: see above.
    """

    def __init__(self, orders: Mapping[str, Order], interleaving: Interleaving) -> None:
        self.orders = orders
        self._interleaving = interleaving
        self.size = sum(order.size for order in orders.values())

    def samples(self, start: int, stop: int) -> Indices:
        """See Order."""
        sources = self._interleaving.sources(start, stop)
        found, first = np.empty_like(sources), 0
        used = zip(self.orders.values(), self.before(start), self.before(stop), strict=True)
        for source, (order, begin, end) in enumerate(used):
            found[sources == source] = first + order.samples(begin, end)
            first += order.size
        return found

    def before(self, position: int) -> list[int]:
        """Number of samples of each source before a position of the run."""
        return self._interleaving.before(position)


# --- specifications -----------------------------------------------------------
#
# {"size": 1000}                                               shuffled
# {"size": 1000, "permutation": "torch"}                       of torch's samplers
# {"shards": [[500, 1], [250, 2]], "shuffle_buffer": 16384}    sequential: one shard of 500 samples,
#                                                              and two of 250
# {"sources": {"web": {"size": 700}, "code": {...}},           mixed; from step 5000 on with other
#  "counts": [[0, [700, 300]], [5000, [500, 500]]]}            counts of samples in PERIOD


Specification = dict[str, Any]
SHUFFLED = [[0, "shuffled"]]  # description of this order
_MOST_SHARDS = 1 << 24
_MOST_SAMPLES = 1 << 62
_MOST_STEPS = 1 << 32


def has_order(dataset: Any) -> bool:
    """Whether a map-style dataset defines its order, as a mixture does."""
    return hasattr(dataset, "order_specification")


def specification_of(dataset: Any, config: LoaderConfig) -> Specification:
    """Specification of the order of a map-style dataset.

    Args:
        dataset: a mixture has `order_specification(config)`, which returns it. Other datasets have
            `shard_samples`, if `config` asks for a sequential order: the number of samples of each
            shard, in the order of the indices.

    Raises:
        UserError: the order is sequential, but the dataset has no shards, or their sizes are wrong.
    """
    if has_order(dataset):
        specification: Specification = dataset.order_specification(config)
        return specification
    size: int = len(dataset)
    if config.order == "shuffled":
        return {"size": size}
    if config.order == "torch":
        return {"size": size, "permutation": "torch"}
    shards = getattr(dataset, "shard_samples", None)
    if shards is None:
        raise UserError(
            "loader.order sequential reads shard after shard, but the training data "
            f"({type(dataset).__name__}) has no `shard_samples`, the number of samples of each "
            "shard: use loader.order shuffled"
        )
    sizes = [int(samples) for samples in shards]
    if min(sizes, default=-1) < 0 or sum(sizes) != size:
        raise UserError(
            f"loader.order sequential: the `shard_samples` of the training data "
            f"({type(dataset).__name__}) are {sum(sizes)} samples, but its length is {size}"
        )
    runs = [[samples, len([*same])] for samples, same in groupby(sizes)]
    return {"shards": runs, "shuffle_buffer": config.shuffle_buffer}


def build_order(specification: Specification, seed: int, global_size: int) -> Order:
    """Build the order of a run.

    Args:
        seed: the run's seed.
        global_size: samples in a step.
    """
    if "sources" not in specification:
        return _build_one(specification, seed, global_size)
    sources, counts = specification["sources"], specification["counts"]
    interleaving = Interleaving([(step * global_size, each) for step, each in counts])
    orders = {}
    for number, (name, source) in enumerate(sources.items()):
        own_seed = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")

        positions = partial(interleaving.positions, number)
        orders[name] = _build_one(source, own_seed, global_size, positions)
    return MixedOrder(orders, interleaving)


def _build_one(
    specification: Specification,
    seed: int,
    global_size: int,
    positions: Callable[[int, int], Indices] = _range,
) -> Order:
    if "permutation" in specification:
        return TorchOrder(specification["size"], seed)
    if "shards" not in specification:
        return ShuffledOrder(specification["size"], seed)
    sizes, repeats = np.array(specification["shards"], dtype=np.int64).T
    shards, buffer = np.repeat(sizes, repeats), specification["shuffle_buffer"]
    return SequentialOrder(shards, buffer, seed, global_size, positions)


def check_specification(found: Specification) -> int:
    """Return the number of samples in an epoch of a specification that was read from a file.

    Raises:
        ValueError: this is not a specification.
    """
    if "sources" not in found:
        return _check_one(found)
    sources: Any = found["sources"]
    counts: Any = found.get("counts")
    if not is_of(sources, dict[str, dict[str, Any]]) or not is_of(counts, list[list[Any]]):
        raise ValueError("sources or counts of the order")
    if not all(map(SOURCE_NAME.fullmatch, sources)):
        raise ValueError("names of the order's sources")
    if not 0 < len(sources) * len(counts) <= MOST_COUNTS or any(len(one) != 2 for one in counts):
        raise ValueError("counts of the order")
    steps = [step for step, _ in counts]
    if not is_of(steps, list[int]) or steps[0] != 0 or any(a >= b for a, b in pairwise(steps)):
        raise ValueError(f"steps of the order are {shown(steps)}")
    for _, each in counts:
        known = is_of(each, list[int]) and len(each) == len(sources) and min(each) >= 0
        if not known or sum(each) != PERIOD:
            raise ValueError(f"counts of the order are {shown(each)}")
    if any(not any(each[i] for _, each in counts) for i in range(len(sources))):
        raise ValueError("counts of the order lack a source")
    _in_range("steps of the order", steps[-1] + 1, _MOST_STEPS)
    return sum(_check_one(source) for source in sources.values())


def _check_one(found: Specification) -> int:
    size = found.get("size")
    if found.get("permutation", "torch") != "torch":
        raise ValueError(f"permutation of the order is {shown(found['permutation'])}")
    if "shards" in found:
        shards, buffer = found["shards"], found.get("shuffle_buffer")
        if not is_of(shards, list[list[int]]) or any(
            len(one) != 2 or min(one) < 0 for one in shards
        ):
            raise ValueError("shards of the order")
        _in_range("shuffle_buffer", buffer, MOST_BUFFER)
        _in_range("shards of the order", sum(count for _, count in shards), _MOST_SHARDS)
        size = sum(samples * count for samples, count in shards)
    _in_range("size of the order", size, _MOST_SAMPLES)
    assert isinstance(size, int)
    return size


def _in_range(name: str, number: object, most: int) -> None:
    if not is_of(number, int) or not 1 <= number <= most:  # type: ignore[operator]
        raise ValueError(f"{name} is {shown(number)}")


def describe(specification: Specification) -> list[list[Any]]:
    """[first step, text] for each part of a run with an order of its own.

    A run that continues from step s must have the same texts for the steps before s.
    """
    if "sources" not in specification:
        return [[0, _describe_one(specification)]]
    sources = specification["sources"]
    return [
        [
            step,
            f"of {PERIOD} samples "
            + ", ".join(
                f"{count} {name} ({_describe_one(sources[name])})"
                for name, count in zip(sources, counts, strict=True)
            ),
        ]
        for step, counts in specification["counts"]
    ]


def _describe_one(specification: Specification) -> str:
    if "permutation" in specification:
        return "shuffled by torch"
    if "shards" not in specification:
        return "shuffled"
    return f"sequential, shuffle_buffer {specification['shuffle_buffer']}"


def same_until(step: int, one: Specification, other: Specification) -> bool:
    """Whether two orders agree on the first `step` steps of a run."""
    first, second = (
        {**order, "counts": [phase for phase in order.get("counts", ()) if phase[0] < step]}
        for order in (one, other)
    )
    return first == second
