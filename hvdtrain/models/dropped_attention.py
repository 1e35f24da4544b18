"""Attention with dropout for ranks that split the heads, equal to dropout on one rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dropped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    documents: Tensor | None,
    part: tuple[int, int],
) -> Tensor:
    """Causal attention for this rank's part of the heads, with the dropout of all heads.

    The random numbers of all heads are drawn, and those of this rank's heads are used. On a CPU
    they equal the numbers that torch's attention draws, so the split model computes the same as the
    whole one. On a GPU the fused kernels draw different numbers.

    Args:
        q, k, v, dropout, documents: see Attend in `models/attention.py`; dropout > 0.
        part: (index of this rank's part of the heads, number of parts).
    """
    batch, heads, time, size = q.shape
    share = heads // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    seen = torch.ones(time, time, dtype=torch.bool, device=q.device).tril()
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = (q @ k.transpose(-1, -2)) / size**0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    rank, parts = part
    kept = F.dropout(weights.new_ones(batch, parts * heads, time, time), dropout)
    return (weights * kept[:, rank * heads : (rank + 1) * heads]) @ v
