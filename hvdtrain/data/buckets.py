"""Micro-batches of samples of similar length, computed from the seed and the position.

Samples are sorted once into buckets of similar length. A micro-batch takes its samples from one
bucket, as many as fit into the budget at the bucket's maximum length, so every epoch has the same
number of micro-batches. In each epoch the permutation of order.py assigns the samples of a bucket
to its micro-batches and shuffles the micro-batches of all buckets. The content of a position
depends only on the seed, the position and the lengths, at a cost that depends on neither the
position nor the number of samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.order import Indices, permute, sample_order
from hvdtrain.errors import UserError

if TYPE_CHECKING:  # the audit and the report run without torch
    from torch.utils.data import Dataset

# Maximum ratio of a bucket's longest sample to its shortest, unless its samples would not fill a
# micro-batch.
_SPREAD = 1.1
# Separates the permutations within buckets from each other and from the micro-batches' permutation.
_SEED_STEP = 0x9E3779B97F4A7C15

Sizes = Sequence[Sequence[int]]  # per bucket: number of samples, samples per micro-batch


class Buckets:
    """Assignment of indices into the sorted samples to micro-batches.

    Args:
        sizes: sizes of the buckets, in sorted order; each has at least one sample.
        seed: the run's seed.

    Attributes:
        samples: number of samples in an epoch.
    """

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self._samples, self._each = np.array(sizes, dtype=np.int64).T
        self._first = np.cumsum([0, *-(-self._samples // self._each)])  # micro-batches before each
        self._begin = np.cumsum([0, *self._samples])  # samples before each
        self._seed = seed
        self._ends: tuple[int, Indices] = -1, np.empty(0, dtype=np.int64)
        self.samples = int(self._begin[-1])

    def __len__(self) -> int:
        """Number of micro-batches in an epoch."""
        return int(self._first[-1])

    def places(self, positions: Indices, epoch: int) -> Indices:
        """Indices into the sorted samples.

        Args:
            positions: positions of micro-batches in the order of an epoch, int64.

        Returns:
            int64, the samples of all these micro-batches, bucket after bucket.
        """
        numbers = permute(positions, len(self), self._seed, epoch)
        buckets = np.searchsorted(self._first, numbers, side="right") - 1
        found = [np.empty(0, dtype=np.int64)]
        for bucket in np.unique(buckets).tolist():
            each, samples = self._each[bucket], int(self._samples[bucket])
            begin = (numbers[buckets == bucket] - self._first[bucket]) * each
            within = (begin[:, None] + np.arange(each)).ravel()
            seed = self._seed + (bucket + 1) * _SEED_STEP
            within_bucket = permute(within[within < samples], samples, seed, epoch)
            found.append(self._begin[bucket] + within_bucket)
        return np.concatenate(found)

    def counts(self, start: int, stop: int) -> Indices:
        """Samples of each micro-batch at the positions start..stop-1 of a run, across epochs."""
        numbers = sample_order(start, stop, len(self), self._seed)
        buckets = np.searchsorted(self._first, numbers, side="right") - 1
        each = self._each[buckets]
        left = self._samples[buckets] - (numbers - self._first[buckets]) * each
        return np.minimum(each, left)

    def samples_before(self, position: int) -> int:
        """Number of samples that a run has used before a micro-batch, across epochs."""
        epoch, at = divmod(position, len(self))
        if self._ends[0] != epoch:  # callers ask for consecutive positions
            begin = epoch * len(self)
            self._ends = epoch, np.cumsum([0, *self.counts(begin, begin + len(self))])
        return epoch * self.samples + int(self._ends[1][at])


class BatchUsage(NamedTuple):
    """Samples and tokens in a set of micro-batches.

    Args:
        samples: number of samples.
        tokens: tokens of these samples, without padding; 0 if samples have no lengths.
        slots: the same with padding: a micro-batch's longest sample x its number of samples.
    """

    samples: int
    tokens: int = 0
    slots: int = 0

    def metrics(self, seconds: float) -> dict[str, float]:
        """Fields of a step in metrics.jsonl besides its samples; empty if samples have no lengths.

        Args:
            seconds: step time.
        """
        if not self.slots:
            return {}
        return {
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / seconds,
            "padding": 1 - self.tokens / self.slots,
        }


class SampleBuckets:
    """Assignment of samples to micro-batches.

    Args:
        lengths: lengths of all samples, in tokens, as returned by `lengths_of`.
        max_tokens: upper limit of a micro-batch's longest sample x its number of samples.
        seed: the run's seed.

    Attributes:
        sizes, order: sizes and order of the buckets, see Buckets.
        fingerprint: 16 hex digits of the lengths.
        micro_batch: the samples of the micro-batch at a position of a run, across epochs.
    """

    def __init__(self, lengths: Indices, max_tokens: int, seed: int) -> None:
        self._lengths = lengths
        self.fingerprint = hashlib.sha256(lengths.tobytes()).hexdigest()[:16]
        self.sizes, shortest = bucket_sizes(lengths, max_tokens)
        self.order = Buckets(self.sizes, seed)
        bucket = len(shortest) - np.searchsorted(shortest[::-1], lengths, side="right")
        self._sorted = np.argsort(bucket, kind="stable")
        # Called when the micro-batch is loaded, and again when its tokens are counted.
        self.micro_batch = lru_cache(maxsize=1024)(self._micro_batch)

    def __len__(self) -> int:
        """Number of micro-batches in an epoch."""
        return len(self.order)

    def _micro_batch(self, position: int) -> list[int]:
        epoch, at = divmod(position, len(self))
        return self._sorted[self.order.places(np.array([at]), epoch)].tolist()

    def samples_of(self, step: int, micro_batches: int) -> int:
        """Number of samples in a step of the run, over all ranks.

        Args:
            micro_batches: per step.
        """
        return int(self.order.counts(step * micro_batches, (step + 1) * micro_batches).sum())

    def used(self, positions: Iterable[int]) -> BatchUsage:
        """Count the samples and tokens in the micro-batches at these positions."""
        samples = tokens = slots = 0
        for position in positions:
            lengths = self._lengths[self.micro_batch(position)]
            samples += len(lengths)
            tokens += int(lengths.sum())
            slots += int(lengths.max()) * len(lengths)
        return BatchUsage(samples, tokens, slots)


def bucket_sizes(lengths: Indices, max_tokens: int) -> tuple[list[list[int]], Indices]:
    """Return each bucket's [samples, samples per micro-batch], and each bucket's shortest length.

    Buckets are ordered from the longest samples to the shortest.
    """
    sizes: list[list[int]] = []
    shortest: list[int] = []
    longest = 0
    found, counts = np.unique(np.maximum(lengths, 1), return_counts=True)
    for length, count in zip(found[::-1].tolist(), counts[::-1].tolist(), strict=True):
        if not sizes or (length * _SPREAD < longest and sizes[-1][0] >= sizes[-1][1]):
            sizes.append([0, max_tokens // length])
            shortest.append(length)
            longest = length
        sizes[-1][0] += count
        shortest[-1] = length
    shortest[-1] = 0  # empty samples go into the bucket of the shortest
    return sizes, np.array(shortest, dtype=np.int64)


def lengths_of(dataset: Dataset[Any], max_tokens: int, name: str) -> Indices:
    """The lengths of a dataset's samples, from its attribute or method `lengths`.

    Args:
        name: name of the data, for messages.

    Raises:
        UserError: `lengths` is missing or does not fit the samples, or a sample exceeds the budget.
    """
    found = getattr(dataset, "lengths", None)
    if found is None:
        raise UserError(
            f"batch.max_tokens needs the lengths of the samples: the {name} data "
            f"({type(dataset).__name__}) has no `lengths`, an array with the tokens of each"
        )
    lengths: NDArray[Any] = np.asarray(found() if callable(found) else found)
    size = len(dataset)  # type: ignore[arg-type]
    if lengths.shape != (size,) or lengths.dtype.kind not in "iu" or lengths.min() < 0:
        raise UserError(
            f"batch.max_tokens: `lengths` of the {name} data must be {size} integers >= 0, one for "
            f"each sample, not {lengths.dtype} of shape {lengths.shape}"
        )
    longest = int(lengths.argmax())
    if lengths[longest] > max_tokens:
        raise UserError(
            f"batch.max_tokens {max_tokens}: sample {longest} of the {name} data has "
            f"{lengths[longest]} tokens: increase batch.max_tokens, or shorten or omit the sample"
        )
    return lengths.astype(np.int64)
