"""Which parameters' gradients travel together.

Buckets are fixed groups of parameters in the order in which backward reaches them, so
that Horovod reduces the same buffers in every run: with more than two ranks a ring
all-reduce adds in an order that depends on the position in the buffer, and buffers
fused by chance would make the last bit of a run depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T", bound=Tensor)

# Large enough that a bucket costs more on the wire than in negotiation.
BUCKET_BYTES = 8 << 20
SMALLEST_BUCKET_BYTES = 1 << 20


def gradient_buckets(parameters: Sequence[T], widening: int = 1) -> list[list[T]]:
    """Those in which gradients travel while backward still works on others.

    A small model has several too. The first is small, so that it leaves early: until then the
    network has nothing to do.

    Args:
        widening: bytes that travel for one of a gradient's.
    """
    total = sum(p.numel() * p.element_size() for p in parameters)
    limit = min(BUCKET_BYTES, max(SMALLEST_BUCKET_BYTES, total // 4)) // widening
    return buckets(parameters, limit, first=limit // 8)


def buckets(
    parameters: Sequence[T], limit: int = BUCKET_BYTES, first: int | None = None
) -> list[list[T]]:
    """Groups parameters, last first, into buckets of one dtype and at most `limit` bytes.

    A parameter larger than `limit` has a bucket of its own.

    Args:
        first: bytes with which the first bucket is full; None: it is as the others.
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
