"""Attention over all earlier tokens, or over a pattern of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hvdtrain.models.attention_kernels import has_flash
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.partial_attention import Documents, Part, Strip, attend_parts

# (q, k, v, dropout probability, documents) -> y. q and y are (batch, heads, time, head_size); k and
# v may have fewer heads, each shared by the same number of neighboring heads of q. `documents`
# (batch, time) numbers the documents in a sequence, which do not see each other; None: only one.
Attend = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]


def attention_of(config: GPTConfig) -> Attend:
    """The attention selected by `model.attention.pattern`."""
    own = config.attention
    if own.pattern == "dilated":
        return DilatedAttention(tuple(own.segment_lengths), tuple(own.dilation_rates))
    if own.pattern == "block_sparse":
        return BlockSparseAttention(own.block_size, own.local_blocks, own.global_blocks)
    return causal_attention


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Tensor | None
) -> Tensor:
    """Causal attention: each position sees itself and earlier positions of its document."""
    share = q.shape[1] // k.shape[1]
    if share > 1 and (documents is not None or not shares_heads(q)):
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        share = 1
    if documents is None:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=share > 1
        )
    seen = (documents[:, :, None] == documents[:, None, :]).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], dropout_p=dropout)


def shares_heads(q: Tensor) -> bool:
    """Whether torch's fused kernel without a mask accepts fewer heads of k and v than of q.

    On CUDA only FlashAttention does. The kernels for float32, and for a mask, require equally many
    heads: otherwise torch computes all (time, time) scores in memory.
    """
    if not q.is_cuda:
        return True
    cast = torch.is_autocast_enabled("cuda")
    return has_flash(q, torch.get_autocast_dtype("cuda") if cast else None)


def dropped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    documents: Tensor | None,
    part: tuple[int, int],
) -> Tensor:
    """Causal attention for this rank's part of the heads, with the dropout of all heads.

    For ranks that split the heads: the result equals dropout on one rank.

    Random numbers are drawn for all heads, and the numbers for this rank's heads are used. On a CPU
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


@dataclass(frozen=True)
class DilatedAttention:
    """LongNet's attention (Ding et al., arXiv:2307.02486), causal.

    For each segment length and its dilation rate r, a sequence is split into segments. In a
    segment, every r-th position attends to the earlier ones of these positions. Head j of keys, and
    the query heads that share it, start at position j modulo r. The results are weighted by their
    softmax denominators; gradients also flow through the weights.

    Args:
        segment_lengths, rates: segment lengths and rates of each pattern.
        first_head: number of the first key head, if a rank has some of the heads.
    """

    segment_lengths: Sequence[int]
    rates: Sequence[int]
    first_head: int = 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Tensor | None
    ) -> Tensor:
        parts = [
            Part(strip, strip, causal=True)
            for length, rate in zip(self.segment_lengths, self.rates, strict=True)
            for strip in self.strips(length, rate, q.shape[2], k.shape[1])
        ]
        return attend_parts(q, k, v, parts, numbers_by_head(documents, k.shape[1]))

    def strips(self, length: int, rate: int, time: int, heads: int) -> Iterator[Strip]:
        """The positions of one pattern in `time` tokens, for all offsets of `heads` heads."""
        full, rest = divmod(time, length)
        for offset in range(rate):
            first = (offset - self.first_head) % rate
            if first >= heads:
                continue
            for start, count, size in ((0, full, length), (full * length, 1, rest)):
                if count and size > offset:
                    yield Strip(start, count, size, offset, rate, first, rate)


@dataclass(frozen=True)
class BlockSparseAttention:
    """Attention of query blocks to their own block, the blocks just before it and the first ones.

    After the local and global blocks of BigBird (Zaheer et al., arXiv:2007.14062) and of Sparse
    Transformers (Child et al., arXiv:1904.10509), causal.

    Args:
        size: tokens per block.
        local: number of key blocks up to and including the queries' own.
        first: number of blocks at the beginning of a sequence that all queries see.
    """

    size: int
    local: int
    first: int

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Tensor | None
    ) -> Tensor:
        parts = list(self.parts(range(q.shape[2])))
        return attend_parts(q, k, v, parts, numbers_by_head(documents, k.shape[1]))

    def parts(self, queries: range, first_key: int = 0, first_at: int = 0) -> Iterator[Part]:
        """Keys that some of the queries of a sequence attend to.

        Args:
            queries: their positions, starting at a block boundary.
            first_key: position of the first available key.
            first_at: index, among the keys, of the first blocks' keys.
        """
        size = self.size
        begin, (full, rest) = queries.start // size, divmod(len(queries), size)
        for back in range(self.local):
            low = max(begin, back)
            for block, count, length in ((low, begin + full - low, size), (begin + full, 1, rest)):
                if count > 0 and length > 0 and block >= back:
                    yield Part(
                        Strip(block * size - queries.start, count, length),
                        Strip((block - back) * size - first_key, count, size if back else length),
                        causal=back == 0,
                    )
        yield from self._first_blocks(queries, first_at)

    def _first_blocks(self, queries: range, first_at: int) -> Iterator[Part]:
        """First blocks, without those that the local blocks already cover."""
        for seen in range(1, self.first + 1):
            block = self.local - 1 + seen
            low = max(queries.start, block * self.size)
            high = queries.stop
            if seen < self.first:
                high = min(high, (block + 1) * self.size)
            if low < high:
                yield Part(
                    Strip(low - queries.start, 1, high - low),
                    Strip(first_at, 1, seen * self.size),
                    causal=False,
                )


def numbers_by_head(documents: Tensor | None, heads: int) -> Documents:
    """The documents of queries and keys, if queries and keys are the same tokens."""
    if documents is None:
        return None
    numbers = documents[:, None].expand(-1, heads, -1)
    return numbers, numbers
