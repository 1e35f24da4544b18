"""Attention that also returns the softmax denominators, so that results can be merged.

Uses torch's fused kernels if there is one and no mask; otherwise matrix products, with a limited
number of rows of scores at a time.

The kernels are private operators, because torch's public attention does not return the
denominators. If their arguments or results change, `parallel.context` fails or computes something
else; tests/single/test_torch_private.py compares their signatures, including those for GPUs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Rows of scores in memory at a time without a fused kernel.
_ROWS = 512
# Limits of torch's FlashAttention on CUDA: channels of a head, and major compute capability.
_LARGEST_HEAD, _OLDEST_WITH_FLASH = 256, 8

Three = tuple[Tensor, Tensor, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the softmax denominators.

    Args:
        q: (batch, heads, queries, head_size).
        k, v: (batch, key heads, keys, head_size).
        causal: there are as many queries as keys, and each query sees the keys up to its own.
        seen: (batch, 1, queries, keys) bool; None: all.

    Returns:
        y like q; (batch, heads, queries), float32 or wider, -inf if a query sees no key.
    """
    if seen is None and q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if seen is None and has_flash(q):
        y, denominators = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[
            :2
        ]
        return y, denominators
    with _without_autocast(q.device.type):
        return _products(q, k, v, causal, seen)


def _products(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, denominators = [], []
    share = q.shape[1] // k.shape[1]
    k, v = (_wide(x).repeat_interleave(share, dim=1) for x in (k, v))
    for begin in range(0, q.shape[2], _ROWS):
        scores = _scores(q, k, begin, causal, seen)
        denominators.append(scores.logsumexp(-1))
        rows.append(_probabilities(scores, denominators[-1]) @ v)
    return torch.cat(rows, dim=2).to(q.dtype), torch.cat(denominators, dim=2)


def attend_backward(
    results: Three, qkv: Three, causal: bool, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of a part.

    Args:
        results: the gradient of y and y, (batch, heads, queries, head_size), and the logarithm of
            the denominators, (batch, heads, queries, 1); all merged over all parts.
        qkv: q, k and v of the part, like the other arguments; see `attend`.
    """
    gradient, y, denominators = results
    denominators = denominators.squeeze(-1).contiguous()
    found: Three
    if seen is None and gradient.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *qkv, y, denominators, 0.0, causal
        )
    elif seen is None and has_flash(gradient):
        # The forward pass returns no cumulative lengths, since all sequences have the same length;
        # any tensor there would select the kernel for different lengths. Without dropout the kernel
        # does not read its random state.
        state = torch.empty(0, dtype=torch.int64, device=gradient.device)
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, *qkv, y, denominators, None, None,
            qkv[0].shape[2], qkv[1].shape[2], 0.0, causal, state, state,
        )  # fmt: skip
    else:
        with _without_autocast(gradient.device.type):
            found = _products_backward((gradient, y, denominators), qkv, causal, seen)
    return found


def _products_backward(results: Three, qkv: Three, causal: bool, seen: Tensor | None) -> Three:
    (gradient, y, denominators), (q, k, v) = results, qkv
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
    of_k, of_v = (x.unflatten(1, (-1, share)).sum(2) for x in (of_k, of_v))
    return torch.cat(of_q, dim=2), of_k, of_v


def has_flash(q: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether CUDA has FlashAttention for queries (..., head_size).

    Args:
        dtype: in which attention computes; None: that of q.
    """
    if not q.is_cuda or (dtype or q.dtype) not in (torch.float16, torch.bfloat16):
        return False
    if q.shape[-1] % 8 or q.shape[-1] > _LARGEST_HEAD:
        return False
    # torch.compile treats these properties as constants.
    return torch.cuda.get_device_properties(q.device).major >= _OLDEST_WITH_FLASH


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def cast_as_autocast(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """Cast to autocast's dtype if autocast is on, as it does for torch's attention."""
    kind = q.device.type
    if not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(q: Tensor, k: Tensor, begin: int, causal: bool, seen: Tensor | None) -> Tensor:
    """Scores of `_ROWS` queries from `begin` on; -inf for keys that are not seen."""
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
