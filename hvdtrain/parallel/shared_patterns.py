"""Dilated and block-sparse attention over a sequence that ranks split into contiguous chunks.

A rank receives only the keys and values to which its queries attend under the pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.models.attention import BlockSparseAttention, DilatedAttention
from hvdtrain.models.partial_attention import Part, Strip, attend_parts
from hvdtrain.parallel.context_checks import check_length
from hvdtrain.parallel.exchange_keys import gather_positions


@dataclass(frozen=True)
class Contiguous:
    """Tokens of a rank: the `rank`-th of `ranks` equal chunks of a sequence."""

    rank: int
    ranks: int

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens of this rank; dimension `dim` of x is the sequence.

        Raises:
            UserError: the sequence cannot be split this way.
        """
        check_length(x.shape[dim], self.ranks, self.ranks)
        return x.chunk(self.ranks, dim)[self.rank]


@dataclass(frozen=True)
class SharedDilated:
    """Dilated attention over a sequence that ranks share.

    Segments within a rank need no data of other ranks; of longer segments a rank receives the
    positions in the pattern that precede its own tokens.

    Args:
        alone: the pattern on one rank.
    """

    alone: DilatedAttention
    group: dist.ProcessGroup

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        (heads, time), rank = k.shape[1:3], self.group.rank()
        everyone = _by_head(documents, heads)
        keys, parts = [torch.cat((k, v), dim=-1)], []
        numbers = [everyone[:, :, rank * time : (rank + 1) * time]]
        for length, rate in zip(self.alone.segment_lengths, self.alone.rates, strict=True):
            strips = list(self.alone.strips(min(length, time), rate, time, heads))
            parts += [Part(strip, strip, causal=True) for strip in strips]
            if length <= time:
                continue
            needs = [[_earlier(other, time, length, rate)] for other in range(self.group.size())]
            (need,) = needs[rank]
            if need:
                held = sum(x.shape[2] for x in keys)
                parts += [Part(strip, _all_of(strip, held, len(need)), False) for strip in strips]
            keys.append(gather_positions(self._picked(keys[0], rate), needs, self.group))
            numbers.append(self._picked(everyone, rate)[:, :, need.start : need.stop])
        k, v = torch.cat(keys, dim=2).chunk(2, dim=-1)
        of_keys = torch.cat(numbers, dim=2)[..., 0]
        seen = None if documents is None else (numbers[0][..., 0], of_keys)
        return attend_parts(q, k, v, parts, seen)

    def _picked(self, x: Tensor, rate: int) -> Tensor:
        """Positions in a pattern for each head, of x (batch, heads, time, channels)."""
        first = self.alone.first_head
        heads = [x[:, head, (first + head) % rate :: rate] for head in range(x.shape[1])]
        return torch.stack(heads, dim=1)


def _earlier(rank: int, time: int, length: int, rate: int) -> range:
    """Positions of a pattern's segment that precede a rank's tokens, in picked positions."""
    begin = rank * time
    return range(begin // length * length // rate, begin // rate)


def _all_of(strip: Strip, start: int, count: int) -> Strip:
    """All keys that were gathered for the pattern of `strip`, for its heads."""
    return Strip(start, 1, count, first_head=strip.first_head, head_stride=strip.head_stride)


def _by_head(documents: Tensor | None, heads: int) -> Tensor:
    """(batch, heads, time, 1); empty if there are no documents."""
    if documents is None:
        return torch.empty(0, heads, 0, 1, dtype=torch.int64)
    return documents[:, None, :, None].expand(-1, heads, -1, -1)


@dataclass(frozen=True)
class SharedBlockSparse:
    """Block-sparse attention: a rank receives the blocks just before its own, and the first ones.

    Args:
        alone: the pattern on one rank.
    """

    alone: BlockSparseAttention
    group: dist.ProcessGroup

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        (heads, time), rank = k.shape[1:3], self.group.rank()
        needs = [self._needs(other, time) for other in range(self.group.size())]
        before, first = needs[rank]
        own = torch.cat((k, v), dim=-1)
        gathered = gather_positions(own, needs, self.group)
        gathered, firsts = gathered.split([len(before), len(first)], dim=2)
        k, v = torch.cat((gathered, own, firsts), dim=2).chunk(2, dim=-1)
        queries = range(rank * time, (rank + 1) * time)
        parts = list(self.alone.parts(queries, before.start, len(before) + time))
        seen = None
        if documents is not None:
            everyone = _by_head(documents, heads)[..., 0]
            near = everyone[:, :, before.start : queries.stop]
            of_keys = torch.cat((near, everyone[:, :, : first.stop]), dim=2)
            seen = (everyone[:, :, queries.start : queries.stop], of_keys)
        return attend_parts(q, k, v, parts, seen)

    def _needs(self, rank: int, time: int) -> list[range]:
        """Positions just before a rank's tokens, and positions of the first blocks farther away."""
        size, local = self.alone.size, self.alone.local
        begin, blocks = rank * time, (rank + 1) * time // size
        first = min(self.alone.first, max(0, blocks - local))
        return [range(max(0, begin - (local - 1) * size), begin), range(first * size)]
