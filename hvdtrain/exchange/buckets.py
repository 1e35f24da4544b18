"""Assignment of parameters to the buckets in which their gradients are sent.

Buckets are fixed groups of parameters in the order in which backward reaches them, so
that Horovod reduces the same buffers in every run: with more than two ranks a ring
all-reduce adds in an order that depends on the position in the buffer, and buffers
fused by timing would make the last bit of a run depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T", bound=Tensor)

# Large enough that transfer takes longer than negotiation.
BUCKET_BYTES = 8 << 20
SMALLEST_BUCKET_BYTES = 1 << 20


def gradient_buckets(parameters: Sequence[T], widening: int = 1) -> list[list[T]]:
    """Buckets whose gradients are sent while backward still computes others.

    A small model also has several buckets. The first one is small, so that it is sent early: until
    then the network is idle.

    Args:
        widening: bytes sent per byte of gradient.
    """
    total = sum(p.numel() * p.element_size() for p in parameters)
    limit = min(BUCKET_BYTES, max(SMALLEST_BUCKET_BYTES, total // 4)) // widening
    return buckets(parameters, limit, first=limit // 8)


def buckets(
    parameters: Sequence[T], limit: int = BUCKET_BYTES, first: int | None = None
) -> list[list[T]]:
    """Group parameters, last first, into buckets of one dtype and at most `limit` bytes.

    A parameter larger than `limit` has its own bucket.

    Args:
        first: bytes with which the first bucket is full; None: the same limit as the others.
    """
    groups: list[list[T]] = []
    size = 0
    for parameter in reversed(parameters):
        full = first is not None and len(groups) == 1 and size >= first
        grown = size + parameter.numel() * parameter.element_size()
        if not groups or full or grown > limit or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            grown -= size
        groups[-1].append(parameter)
        size = grown
    return groups
