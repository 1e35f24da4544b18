"""Context parallelism: ranks split each sequence, and attend to tokens of the other ranks.

With dilated and block-sparse attention, ranks hold contiguous chunks, and a rank receives only the
keys and values to which its queries attend under the pattern. See ring_attention.py for full
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain import comm
from hvdtrain.errors import UserError, require
from hvdtrain.models.attention import Attend, BlockSparseAttention, DilatedAttention
from hvdtrain.models.attention_kernels import cast_as_autocast
from hvdtrain.models.gpt import GPT, Attention
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.partial_attention import Part, Strip, attend_parts
from hvdtrain.parallel.ring_attention import RingAttention, ZigZag, check_length


@dataclass(frozen=True)
class SplitAttention:
    """Attention over sequences that are split between ranks.

    Args:
        alone: the attention on one rank.
        across: called with q, k and v of this rank's tokens, and `documents` of all tokens.
    """

    alone: Attend
    across: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Tensor | None
    ) -> Tensor:
        return self.across(*cast_as_autocast(q, k, v), documents)


def apply_context(model: GPT, group: dist.ProcessGroup) -> None:
    """Split each of the model's input sequences between the ranks of `group`.

    Each rank receives the whole batch, computes its own tokens (`model.local`), and returns their
    logits; `model.loss` is its share of the mean. So the losses of the group sum to the loss, and
    their gradients of a parameter sum to its gradient. Called by all ranks of the group; again when
    a new group was formed.

    Args:
        group: gloo for a model on CPUs, NCCL on GPUs; its timeout limits every wait.

    Raises:
        UserError: the model's sequences cannot be split this way, see `check_context`.
    """
    try:
        check_context(model.config, group.size())
    except ValueError as error:
        raise UserError(str(error)) from None
    if group.size() > 1:
        # NCCL requires all ranks in a group's first call; later only some of them communicate.
        dist.all_reduce(torch.zeros(1, device=model.embedding.weight.device), group=group)
    for attention in _attentions(model):
        attention.attend = split_attention(attention.attend, group)
    split = ZigZag if model.config.attention.pattern == "full" else Contiguous
    model.split = split(group.rank(), group.size()) if group.size() > 1 else None


def split_attention(attend: Attend, group: dist.ProcessGroup) -> Attend:
    """Return `attend` for q, k and v of this rank's tokens, and `documents` of all tokens."""
    attend = alone(attend)
    if group.size() == 1:
        return attend
    if isinstance(attend, DilatedAttention):
        return SplitAttention(attend, SharedDilated(attend, group))
    if isinstance(attend, BlockSparseAttention):
        return SplitAttention(attend, SharedBlockSparse(attend, group))
    return SplitAttention(attend, RingAttention(group))


def alone(attend: Attend) -> Attend:
    """Return the attention that was passed to `split_attention`."""
    return attend.alone if isinstance(attend, SplitAttention) else attend


@contextmanager
def undivided(model: GPT) -> Iterator[None]:
    """Compute whole sequences, of any length, on this rank alone inside the context."""
    split, kept = model.split, [(each, each.attend) for each in _attentions(model)]
    model.split = None
    for attention, attend in kept:
        attention.attend = alone(attend)
    try:
        yield
    finally:
        model.split = split
        for attention, attend in kept:
            attention.attend = attend


def _attentions(model: GPT) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def check_context(model: GPTConfig, ranks: int) -> None:
    """Check that `ranks` ranks (`parallel.context`) can split each sequence of a model.

    Raises:
        ValueError: with a message for the user.
    """
    if ranks == 1:
        return
    attention = model.attention
    chunks = 2 * ranks if attention.pattern == "full" else ranks
    require(
        model.context % chunks == 0,
        f"model.context {model.context} is not a multiple of {chunks}, into which parallel.context "
        f"{ranks} divides it: the nearest that is one is {_nearest(model.context, chunks)}",
    )
    require(
        model.dropout == 0,
        f"parallel.context {ranks} excludes model.dropout {model.dropout}: ranks of a sequence "
        "would draw other numbers than one rank does",
    )
    local = model.context // ranks
    given = f"parallel.context {ranks} gives a rank {local} tokens"
    if attention.pattern == "block_sparse":
        require(
            local % attention.block_size == 0,
            f"{given}, which model.attention.block_size {attention.block_size} does not divide",
        )
    for length, rate in zip(attention.segment_lengths, attention.dilation_rates, strict=True):
        require(
            local % length == 0 or length % local == 0,
            f"{given}: model.attention.segment_lengths {length} must divide that or be a multiple "
            "of it",
        )
        require(
            length <= local or local % rate == 0,
            f"{given}, which the model.attention.dilation_rates {rate} of segments longer than "
            "that does not divide",
        )


def _nearest(tokens: int, chunks: int) -> int:
    return max(1, round(tokens / chunks)) * chunks


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


# For each rank, the ranges of positions that it needs, in the sequence of all ranks.
Needs = Sequence[Sequence[range]]


def gather_positions(x: Tensor, needs: Needs, group: dist.ProcessGroup) -> Tensor:
    """Return the positions that this rank needs; differentiable. Nothing else is sent.

    Called by all ranks of `group`, with the same `needs`.

    Args:
        x: (..., positions, channels) of this rank; rank r has positions r * n to (r + 1) * n - 1.

    Returns:
        (..., positions of needs[this rank], channels).
    """
    gathered: Tensor = _Gather.apply(x, needs, group)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, needs: Needs, group: dist.ProcessGroup) -> Tensor:
        ctx.needs, ctx.group, ctx.positions = needs, group, x.shape[-2]
        rank, ranks = group.rank(), group.size()
        wanted = [_Wanted(needs[rank], owner, x.shape[-2]) for owner in range(ranks)]
        found = x.new_empty((*x.shape[:-2], sum(map(len, needs[rank])), x.shape[-1]))
        send = {
            peer: _Wanted(needs[peer], rank, x.shape[-2]).read_of_owner(x) for peer in range(ranks)
        }
        shapes = {owner: wanted[owner].shape(x) for owner in range(ranks)}
        for owner, tensor in _swap(send, shapes, x, group).items():
            wanted[owner].write(found, tensor)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needs, group, positions = ctx.needs, ctx.group, ctx.positions
        rank, ranks = group.rank(), group.size()
        send = {
            owner: _Wanted(needs[rank], owner, positions).read(gradient) for owner in range(ranks)
        }
        given = {peer: _Wanted(needs[peer], rank, positions) for peer in range(ranks)}
        shapes = {peer: given[peer].shape(gradient) for peer in range(ranks)}
        total = gradient.new_zeros((*gradient.shape[:-2], positions, gradient.shape[-1]))
        for peer, tensor in sorted(_swap(send, shapes, gradient, group).items()):
            given[peer].add_to_owner(total, tensor)
        return total, None, None


class _Wanted:
    """Positions needed from one owner: places at the owner, and among all needed positions."""

    def __init__(self, needs: Sequence[range], owner: int, positions: int) -> None:
        self._pairs: list[tuple[slice, slice]] = []
        begin, end, place = owner * positions, (owner + 1) * positions, 0
        for need in needs:
            low, high = max(need.start, begin), min(need.stop, end)
            if low < high:
                there = slice(low - begin, high - begin)
                here = place + low - need.start
                self._pairs.append((there, slice(here, here + high - low)))
            place += len(need)

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Shape of the message, for x with other positions."""
        positions = sum(here.stop - here.start for _, here in self._pairs)
        return (*x.shape[:-2], positions, x.shape[-1])

    def read_of_owner(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., :0, :], *(x[..., there, :] for there, _ in self._pairs)], dim=-2)

    def read(self, found: Tensor) -> Tensor:
        parts = (found[..., here, :] for _, here in self._pairs)
        return torch.cat([found[..., :0, :], *parts], dim=-2)

    def write(self, found: Tensor, message: Tensor) -> None:
        for (_, here), part in self._split(message):
            found[..., here, :] = part

    def add_to_owner(self, x: Tensor, message: Tensor) -> None:
        for (there, _), part in self._split(message):
            x[..., there, :] += part

    def _split(self, message: Tensor) -> list[tuple[tuple[slice, slice], Tensor]]:
        sizes = [here.stop - here.start for _, here in self._pairs]
        return list(zip(self._pairs, message.split(sizes, dim=-2), strict=True)) if sizes else []


def _swap(
    send: dict[int, Tensor], shapes: dict[int, tuple[int, ...]], like: Tensor,
    group: dist.ProcessGroup,
) -> dict[int, Tensor]:  # fmt: skip
    """Send each rank its tensor, and return the tensors received; empty ones are not sent."""
    rank = group.rank()
    received = {rank: send[rank]}
    operations = []
    for peer in range(group.size()):
        if peer == rank:
            continue
        if send[peer].numel():
            tensor = send[peer].contiguous()
            operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=peer))
        received[peer] = like.new_empty(shapes[peer])
        if received[peer].numel():
            operations.append(dist.P2POp(dist.irecv, received[peer], group=group, group_peer=peer))
    with comm.COLLECTIVES.waiting("context"):
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    return received
