"""Exchange of keys and values between ranks, and of their gradients in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain import comm

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
