"""The order of samples, computed from the seed and the position; nothing is stored.

Position p of a run belongs to epoch p // n and is the sample permutation(p % n) of that epoch. The
permutation is a Feistel network over the smallest power of two that holds n, with cycle-walking: a
result outside 0..n-1 is passed through the network again until it is inside (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002). Any position is computed in constant time and
memory. A dataset of 10^9 samples therefore costs a rank as much as one of ten, and any number of
ranks can share the work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
