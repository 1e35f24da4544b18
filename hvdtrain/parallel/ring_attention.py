"""Full causal attention over a sequence split between ranks (Liu et al., arXiv:2310.01889).

A sequence is cut into 2N chunks; rank r of N holds the r-th and the r-th last, so all ranks have
the same amount of computation under a causal mask. Keys and values are sent around the ring of
ranks, and each rank merges the attention of its queries to the keys it has received. In backward
they are sent around once more, together with the sum of their gradients, which after N passes is
back at its owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain import comm
from hvdtrain.errors import UserError
from hvdtrain.models.attention_kernels import attend, attend_backward
from hvdtrain.models.partial_attention import empty_result, merge_, same_document


@dataclass(frozen=True)
class ZigZag:
    """Tokens of a rank: of 2 * `ranks` chunks the `rank`-th and the `rank`-th last."""

    rank: int
    ranks: int

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens of this rank; dimension `dim` of x is the sequence.

        Raises:
            UserError: the sequence cannot be split this way.
        """
        check_length(x.shape[dim], 2 * self.ranks, self.ranks)
        chunks = x.chunk(2 * self.ranks, dim)
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim)


def check_length(tokens: int, chunks: int, ranks: int) -> None:
    """Raise UserError if a sequence of `tokens` tokens cannot be split into equal chunks."""
    if tokens % chunks:
        raise UserError(
            f"a sequence of {tokens} tokens cannot be shared by the {ranks} ranks of "
            f"parallel.context: it is not a multiple of {chunks}"
        )


@dataclass(frozen=True)
class RingAttention:
    """Full attention for q, k and v of this rank's tokens, and `documents` of all tokens."""

    group: dist.ProcessGroup

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        y: Tensor = _Ring.apply(q, k, v, self.group, documents)
        return y


@dataclass(frozen=True)
class _Piece:
    """Slices of a rank's queries, and of another rank's keys to which they attend."""

    queries: slice
    keys: slice
    causal: bool


def _piece(rank: int, other: int, time: int) -> _Piece:
    """Chunks `rank` and -1 - rank of queries, `other` and -1 - other of keys.

    An earlier rank's first chunk is before both of this rank's chunks, its second after both. Both
    chunks of a later rank are between this rank's chunks.
    """
    if other == rank:
        return _Piece(slice(0, time), slice(0, time), causal=True)
    if other < rank:
        return _Piece(slice(0, time), slice(0, time // 2), causal=False)
    return _Piece(slice(time // 2, time), slice(0, time), causal=False)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup,
        documents: Tensor | None,
    ) -> Tensor:  # fmt: skip
        rank, ranks, time = group.rank(), group.size(), q.shape[2]
        y, denominators = empty_result(q)
        held = torch.stack((k, v))
        for turn in range(ranks):
            last = turn == ranks - 1
            pending = None if last else _Pending(held, group)  # overlaps with the computation
            other = (rank - turn) % ranks
            piece = _piece(rank, other, time)
            seen = _seen(documents, piece, rank, other, ranks)
            rows, keys = piece.queries, held[:, :, :, piece.keys]
            found = attend(q[:, :, rows], keys[0], keys[1], piece.causal, seen)
            merge_(y[:, :, rows], denominators[:, :, rows], found[0], found[1][..., None])
            if pending is not None:
                held = pending.wait()
        y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, denominators, documents)
        ctx.group = group
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, denominators, documents = ctx.saved_tensors
        group: dist.ProcessGroup = ctx.group
        rank, ranks, time = group.rank(), group.size(), q.shape[2]
        of_q = torch.zeros_like(q, dtype=denominators.dtype)
        held = torch.stack((k, v))
        sums = torch.zeros_like(held, dtype=denominators.dtype)
        for turn in range(ranks):
            pending = None if turn == ranks - 1 else _Pending(held, group)
            other = (rank - turn) % ranks
            piece = _piece(rank, other, time)
            seen = _seen(documents, piece, rank, other, ranks)
            rows, keys = piece.queries, held[:, :, :, piece.keys]
            results = (gradient[:, :, rows], y[:, :, rows], denominators[:, :, rows])
            found = attend_backward(results, (q[:, :, rows], keys[0], keys[1]), piece.causal, seen)
            of_q[:, :, rows] += found[0]
            place = sums[:, :, :, piece.keys]
            place[0] += found[1]
            place[1] += found[2]
            # The sums follow the keys, one pass behind; only the sums are sent in the last pass.
            sums = _Pending(sums, group).wait()
            if pending is not None:
                held = pending.wait()
        of_k, of_v = sums.to(k.dtype)
        return of_q.to(q.dtype), of_k, of_v, None, None


def _seen(
    documents: Tensor | None, piece: _Piece, rank: int, other: int, ranks: int
) -> Tensor | None:
    if documents is None:
        return None
    queries, keys = (ZigZag(holder, ranks)(documents, 1) for holder in (rank, other))
    return same_document(queries[:, piece.queries], keys[:, piece.keys])


class _Pending:
    """Pending send of a tensor to the next rank, and receive from the previous rank."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = group.rank(), group.size()
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(self._sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, group_peer=(rank + 1) % ranks),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % ranks),
            ]
        )

    def wait(self) -> Tensor:
        with comm.COLLECTIVES.waiting("context"):
            for work in self._works:
                work.wait()
        return self._received
