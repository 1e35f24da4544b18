"""Causal attention as a sum of parts, each over some of the queries and some of the keys.

Each part is a separate attention. The results are merged, weighted by the logarithms of the softmax
denominators, as in the blocks of FlashAttention and ring attention (Liu et al., arXiv:2310.01889).
The merged result equals one softmax over the keys of all parts; a key in two parts counts twice.
Pairs outside all parts are not computed, and no scores are kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdtrain.models.attention_kernels import Three, attend, attend_backward, cast_as_autocast


@dataclass(frozen=True)
class Strip:
    """Positions and heads of keys and values: every `stride`-th position of some segments.

    Args:
        start: position at which the first segment begins.
        count: number of consecutive segments.
        length: positions per segment.
        offset, stride: which positions of a segment are included.
        first_head, head_stride: which heads are included.
    """

    start: int
    count: int
    length: int
    offset: int = 0
    stride: int = 1
    first_head: int = 0
    head_stride: int = 1

    def of(self, x: Tensor) -> Tensor:
        """A view (batch, segments, key heads, share, positions, channels) of x.

        Args:
            x: (batch, key heads, share, time, channels); share: query heads per key head.
        """
        segments = x[:, self.first_head :: self.head_stride]
        segments = segments.narrow(3, self.start, self.count * self.length)
        segments = segments.unflatten(3, (self.count, self.length)).movedim(3, 1)
        return segments[..., self.offset :: self.stride, :]


@dataclass(frozen=True)
class Part:
    """Queries that attend to keys, segment by segment.

    Args:
        causal: a query attends to the keys up to its own index in its segment; else to all keys.
    """

    queries: Strip
    keys: Strip
    causal: bool


# Document numbers of queries and keys, each (batch, key heads, time): a query does not attend to
# keys of another document. None: there is only one document.
Documents = tuple[Tensor, Tensor] | None


def attend_parts(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], documents: Documents = None
) -> Tensor:
    """Attention over all `parts`.

    Args:
        q: (batch, heads, time, head_size).
        k, v: (batch, key heads, keys, head_size); heads is a multiple of key heads.

    Returns:
        (batch, heads, time, head_size), 0 for a query that is in no part.
    """
    q, k, v = cast_as_autocast(q, k, v)
    merged: Tensor = _Merged.apply(q, k, v, parts, documents)
    return merged


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], documents: Documents
    ) -> Tensor:
        heads = k.shape[1]
        y, denominators = empty_result(q)
        for part in parts:
            found = attend(*_inputs(part, q, k, v), part.causal, _seen(part, documents))
            shape = part.queries.of(by_key_heads(q, heads)).shape
            merge_(
                part.queries.of(by_key_heads(y, heads)),
                part.queries.of(by_key_heads(denominators, heads)),
                found[0].view(shape),
                found[1].view(*shape[:-1], 1),
            )
        y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, denominators, *(documents or ()))
        ctx.parts = parts
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, denominators, *documents = ctx.saved_tensors
        heads = k.shape[1]
        sums = [torch.zeros_like(x, dtype=denominators.dtype) for x in (q, k, v)]
        for part in ctx.parts:
            results = (
                _folded(part.queries, gradient, heads),
                _folded(part.queries, y, heads),
                _folded(part.queries, denominators, heads),
            )
            seen = _seen(part, (documents[0], documents[1]) if documents else None)
            found = attend_backward(results, _inputs(part, q, k, v), part.causal, seen)
            strips = (part.queries, part.keys, part.keys)
            for total, strip, one in zip(sums, strips, found, strict=True):
                place = strip.of(by_key_heads(total, heads))
                place += one.view(place.shape)
        return (*(x.to(q.dtype) for x in sums), None, None)


def by_key_heads(x: Tensor, heads: int) -> Tensor:
    """A view (batch, key heads, share, time, channels) of x (batch, heads, time, channels)."""
    return x.unflatten(1, (heads, -1))


def _folded(strip: Strip, x: Tensor, heads: int) -> Tensor:
    """Fold to (batch * segments, heads of the strip, positions, channels)."""
    return strip.of(by_key_heads(x, heads)).flatten(2, 3).flatten(0, 1)


def _inputs(part: Part, q: Tensor, k: Tensor, v: Tensor) -> Three:
    heads = k.shape[1]
    return (
        _folded(part.queries, q, heads),
        _folded(part.keys, k, heads),
        _folded(part.keys, v, heads),
    )


def _seen(part: Part, documents: Documents) -> Tensor | None:
    """(batch * segments, 1, queries, keys): whether query and key are in the same document."""
    if documents is None:
        return None
    queries, keys = (
        strip.of(numbers[:, :, None, :, None])[:, :, 0, 0, :, 0].flatten(0, 1)
        for strip, numbers in zip((part.queries, part.keys), documents, strict=True)
    )
    return same_document(queries, keys)


def same_document(queries: Tensor, keys: Tensor) -> Tensor:
    """(batch, 1, queries, keys), from document numbers (batch, queries) and (batch, keys)."""
    return (queries[:, :, None] == keys[:, None, :])[:, None]


def empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """(y, logarithm of the denominators) over no keys: 0 and -inf, for `merge_`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    y = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    return y, y.new_full((*q.shape[:-1], 1), float("-inf"))


def merge_(y: Tensor, denominators: Tensor, other: Tensor, others: Tensor) -> None:
    """Merge the attention over other keys into `y` and its log-denominators, in place."""
    both = torch.logaddexp(denominators, others)
    finite = both.masked_fill(both == float("-inf"), 0.0)
    y.mul_((denominators - finite).exp_()).addcmul_(other, (others - finite).exp_())
    denominators.copy_(both)
