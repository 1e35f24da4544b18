"""Causal attention as a sum of parts, each over some of the queries and some of the keys.

Each part is an attention of its own. Their results are merged with the logarithms of the softmax's
denominators as weights, as in FlashAttention's and ring attention's blocks (Liu et al.,
arXiv:2310.01889): the result is that of one softmax over the keys of all parts, where a key that
two parts have counts twice. What no part has is not computed, and no part's scores are kept for the
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Rows of scores that are in memory at a time where no fused kernel serves.
_ROWS = 512


@dataclass(frozen=True)
class Strip:
    """Positions and heads of keys and values: each `stride`-th position of some segments.

    Args:
        start: position at which the first segment begins.
        count: segments, which follow each other.
        length: positions of each.
        offset, stride: which positions of a segment belong to it.
        first_head, head_stride: which heads have these positions.
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
            x: (batch, key heads, share, time, channels); share: heads of queries for one of keys.
        """
        segments = x[:, self.first_head :: self.head_stride]
        segments = segments.narrow(3, self.start, self.count * self.length)
        segments = segments.unflatten(3, (self.count, self.length)).movedim(3, 1)
        return segments[..., self.offset :: self.stride, :]


@dataclass(frozen=True)
class Part:
    """Queries that attend to keys, segment by segment.

    Args:
        causal: a query attends to the keys up to its own index in its segment; else to all.
    """

    queries: Strip
    keys: Strip
    causal: bool


# Numbers of the documents of queries and keys, each (batch, key heads, time): a query does not
# attend to keys of another document. None: there is one.
Documents = tuple[Tensor, Tensor] | None


def attend_parts(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], documents: Documents = None
) -> Tensor:
    """Attention over all `parts`.

    Args:
        q: (batch, heads, time, head_size).
        k, v: (batch, key heads, keys, head_size); heads is a multiple of key heads.

    Returns:
        (batch, heads, time, head_size), 0 for a query that no part has.
    """
    kind = q.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        with torch.autocast(kind, enabled=False):
            return attend_parts(q, k, v, parts, documents)
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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, y, denominators, *documents = ctx.saved_tensors
        heads = k.shape[1]
        sums = [torch.zeros_like(x, dtype=denominators.dtype) for x in (q, k, v)]
        for part in ctx.parts:
            results = (_folded(part.queries, x, heads) for x in (gradient, y, denominators))
            seen = _seen(part, tuple(documents) if documents else None)
            found = attend_backward(
                *results, *_inputs(part, q, k, v), causal=part.causal, seen=seen
            )
            strips = (part.queries, part.keys, part.keys)
            for total, strip, one in zip(sums, strips, found, strict=True):
                place = strip.of(by_key_heads(total, heads))
                place += one.view(place.shape)
        return (*(x.to(q.dtype) for x in sums), None, None)


def by_key_heads(x: Tensor, heads: int) -> Tensor:
    """A view (batch, key heads, share, time, channels) of x (batch, heads, time, channels)."""
    return x.unflatten(1, (heads, -1))


def _folded(strip: Strip, x: Tensor, heads: int) -> Tensor:
    """(batch * segments, heads of the strip, positions, channels)."""
    return strip.of(by_key_heads(x, heads)).flatten(2, 3).flatten(0, 1)


def _inputs(part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = k.shape[1]
    return (
        _folded(part.queries, q, heads),
        _folded(part.keys, k, heads),
        _folded(part.keys, v, heads),
    )


def _seen(part: Part, documents: Documents) -> Tensor | None:
    """(batch * segments, 1, queries, keys): whether they are of one document."""
    if documents is None:
        return None
    queries, keys = (
        strip.of(numbers[:, :, None, :, None])[:, :, 0, 0, :, 0].flatten(0, 1)
        for strip, numbers in zip((part.queries, part.keys), documents, strict=True)
    )
    return same_document(queries, keys)


def same_document(queries: Tensor, keys: Tensor) -> Tensor:
    """(batch, 1, queries, keys), of numbers (batch, queries) and (batch, keys)."""
    return (queries[:, :, None] == keys[:, None, :])[:, None]


def empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """(y, logarithm of the denominators) of no keys: 0 and -inf, for `merge_`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    y = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    return y, y.new_full((*q.shape[:-1], 1), float("-inf"))


def merge_(y: Tensor, denominators: Tensor, other: Tensor, others: Tensor) -> None:
    """Merges the attention over other keys into `y` and its log-denominators, in place."""
    both = torch.logaddexp(denominators, others)
    finite = both.masked_fill(both == float("-inf"), 0.0)
    y.mul_((denominators - finite).exp_()).addcmul_(other, (others - finite).exp_())
    denominators.copy_(both)


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the softmax's denominators.

    Args:
        q: (batch, heads, queries, head_size).
        k, v: (batch, key heads, keys, head_size).
        causal: there are as many queries as keys, and each sees those up to its own.
        seen: (batch, 1, queries, keys) bool; None: all.

    Returns:
        y like q; (batch, heads, queries), float32 or wider, -inf where nothing is seen.
    """
    if seen is None and q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if seen is None and _has_flash(q):
        y, denominators = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[
            :2
        ]
        return y, denominators
    rows, denominators = [], []
    share = q.shape[1] // k.shape[1]
    k, v = (_wide(x).repeat_interleave(share, dim=1) for x in (k, v))
    for begin in range(0, q.shape[2], _ROWS):
        scores = _scores(q, k, begin, causal, seen)
        denominators.append(scores.logsumexp(-1))
        rows.append(_probabilities(scores, denominators[-1]) @ v)
    return torch.cat(rows, dim=2).to(q.dtype), torch.cat(denominators, dim=2)


def attend_backward(
    gradient: Tensor, y: Tensor, denominators: Tensor, q: Tensor, k: Tensor, v: Tensor, *,
    causal: bool, seen: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v of a part.

    Args:
        gradient, y: (batch, heads, queries, head_size), of all parts together.
        denominators: (batch, heads, queries, 1), likewise.
    """
    denominators = denominators.squeeze(-1)
    if seen is None and q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, y, denominators.contiguous(), 0.0, causal
        )
    if seen is None and _has_flash(q):
        return _flash_backward(gradient, y, denominators, (q, k, v), causal)
    share = q.shape[1] // k.shape[1]
    wide_k, wide_v = (_wide(x).repeat_interleave(share, dim=1) for x in (k, v))
    of_k, of_v = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    of_q = []
    for begin in range(0, q.shape[2], _ROWS):
        rows = slice(begin, begin + _ROWS)
        incoming = _wide(gradient[:, :, rows])
        scores = _scores(q, wide_k, begin, causal, seen)
        shares = _probabilities(scores, denominators[:, :, rows])
        of_v += shares.mT @ incoming
        mean = (incoming * y[:, :, rows]).sum(-1, keepdim=True)
        of_scores = shares * (incoming @ wide_v.mT - mean) * q.shape[-1] ** -0.5
        of_q.append(of_scores @ wide_k)
        of_k += of_scores.mT @ _wide(q[:, :, rows])
    return (
        torch.cat(of_q, dim=2),
        of_k.unflatten(1, (-1, share)).sum(2),
        of_v.unflatten(1, (-1, share)).sum(2),
    )


def _has_flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0


def _flash_backward(
    gradient: Tensor, y: Tensor, denominators: Tensor, qkv: tuple[Tensor, ...], causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Without dropout the kernel reads nothing of the lengths of sequences and the random state."""
    none = torch.empty(0, dtype=torch.int64, device=gradient.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        gradient, *qkv, y, denominators.contiguous(), none, none,
        qkv[0].shape[2], qkv[1].shape[2], 0.0, causal, none, none,
    )  # fmt: skip


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(q: Tensor, k: Tensor, begin: int, causal: bool, seen: Tensor | None) -> Tensor:
    """Of `_ROWS` queries from `begin` on; -inf where a key is not seen."""
    rows = slice(begin, begin + _ROWS)
    scores = _wide(q[:, :, rows]) @ k.mT * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(begin + 1)
        scores = scores.masked_fill(later, float("-inf"))
    if seen is not None:
        scores = scores.masked_fill(~seen[:, :, rows], float("-inf"))
    return scores


def _probabilities(scores: Tensor, denominators: Tensor) -> Tensor:
    none = denominators == float("-inf")
    return (scores - denominators.masked_fill(none, 0.0)[..., None]).exp_()
