"""Sample order: properties over any dataset size, seed and epoch."""

from __future__ import annotations

import time
import tracemalloc
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.data.order import permute, sample_order

SIZES = st.integers(1, 3000)
SEEDS = st.integers(0, 2**64)
EPOCHS = st.integers(0, 2**40)
# NumPy's first call in a process may take longer than hypothesis allows for an example.
no_deadline = settings(deadline=None)


def _epoch(size: int, seed: int, epoch: int) -> list[int]:
    return permute(np.arange(size, dtype=np.int64), size, seed, epoch).tolist()


@no_deadline
@given(size=SIZES, seed=SEEDS, epoch=EPOCHS)
def test_epoch_contains_each_sample_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(_epoch(size, seed, epoch)) == list(range(size))


# From 30 samples on, two permutations are equal by chance less often than once in 10^32.
@no_deadline
@given(size=st.integers(30, 3000), seed=SEEDS, epoch=EPOCHS)
def test_consecutive_epochs_have_different_orders(size: int, seed: int, epoch: int) -> None:
    assert _epoch(size, seed, epoch) != _epoch(size, seed, epoch + 1)


@no_deadline
@given(size=st.integers(30, 3000), seed=st.integers(0, 2**63), epoch=EPOCHS)
def test_different_seeds_give_different_orders(size: int, seed: int, epoch: int) -> None:
    assert _epoch(size, seed, epoch) != _epoch(size, seed + 1, epoch)


@no_deadline
@given(size=st.integers(1, 60), seed=SEEDS, start=st.integers(0, 300), length=st.integers(0, 300))
def test_range_across_epochs_concatenates_their_orders(
    size: int, seed: int, start: int, length: int
) -> None:
    epochs = [index for e in range((start + length) // size + 1) for index in _epoch(size, seed, e)]
    expected = epochs[start : start + length]
    assert sample_order(start, start + length, size, seed).tolist() == expected


@no_deadline
@given(cuts=st.lists(st.integers(0, 500), max_size=6), size=st.integers(1, 200), seed=SEEDS)
def test_order_does_not_depend_on_step_boundaries(cuts: list[int], size: int, seed: int) -> None:
    borders = sorted({0, 500, *cuts})
    parts = [sample_order(a, b, size, seed) for a, b in pairwise(borders)]
    assert np.concatenate(parts).tolist() == sample_order(0, 500, size, seed).tolist()


def test_order_of_a_billion_samples_needs_little_time_and_memory() -> None:
    size = 10**9
    tracemalloc.start()
    started = time.process_time()
    across = sample_order(size - 2048, size + 2048, size, seed=7)
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert across.min() >= 0 and across.max() < size
    assert len(set(across[:2048].tolist())) == 2048
    assert peak < 100 << 20
    assert seconds < 1


def test_first_sample_is_uniform_over_seeds() -> None:
    size, seeds = 10, 5000
    first = np.array([sample_order(0, 1, size, seed)[0] for seed in range(seeds)])
    counts = np.bincount(first, minlength=size)
    chi_square = float(((counts - seeds / size) ** 2 / (seeds / size)).sum())
    assert chi_square < 33.7  # 9 degrees of freedom: exceeded once in 10,000


def test_order_is_uncorrelated_with_index_and_neighbors() -> None:
    order = sample_order(0, 100_000, 100_000, seed=3)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(len(order)), order)[0, 1]) < 0.02


def test_order_is_stable_across_versions() -> None:
    # A run that resumes with a new version continues in the same order.
    assert sample_order(0, 12, 10, 1234).tolist() == [4, 7, 0, 8, 6, 9, 3, 2, 1, 5, 5, 3]
    assert sample_order(10**9 - 3, 10**9 + 3, 10**9, 0).tolist() == [
        765268406, 522073734, 994307813, 229708026, 94413417, 192619625,
    ]  # fmt: skip
    assert sample_order(0, 5, 1000, 2**63).tolist() == [545, 512, 322, 276, 531]
