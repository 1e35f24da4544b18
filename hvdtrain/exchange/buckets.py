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


def bucket_limit(parameters: Sequence[Tensor]) -> int:
    """Bytes of a bucket: a small model has several too, so that the first ones leave while
    backward still works on the others."""
    total = sum(p.numel() * p.element_size() for p in parameters)
    return min(BUCKET_BYTES, max(SMALLEST_BUCKET_BYTES, total // 4))


def buckets(parameters: Sequence[T], limit: int = BUCKET_BYTES) -> list[list[T]]:
    """Groups parameters, last first, into buckets of one dtype and at most `limit` bytes.

    A parameter larger than `limit` has a bucket of its own.
    """
    groups: list[list[T]] = []
    size = 0
    for parameter in reversed(parameters):
        grown = size + parameter.numel() * parameter.element_size()
        if not groups or grown > limit or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            grown -= size
        groups[-1].append(parameter)
        size = grown
    return groups
