"""Context parallelism: ranks split each sequence, and attend to tokens of the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.errors import UserError
from hvdtrain.models.attention import Attend, BlockSparseAttention, DilatedAttention
from hvdtrain.models.attention_kernels import cast_as_autocast
from hvdtrain.models.gpt import GPT, Attention
from hvdtrain.parallel.context_checks import check_context
from hvdtrain.parallel.ring_attention import RingAttention, ZigZag
from hvdtrain.parallel.shared_patterns import Contiguous, SharedBlockSparse, SharedDilated


@dataclass(frozen=True)
class Shared:
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
        attention.attend = shared(attention.attend, group)
    split = ZigZag if model.config.attention == "full" else Contiguous
    model.split = split(group.rank(), group.size()) if group.size() > 1 else None


def shared(attend: Attend, group: dist.ProcessGroup) -> Attend:
    """Return `attend` for q, k and v of this rank's tokens, and `documents` of all tokens."""
    attend = alone(attend)
    if group.size() == 1:
        return attend
    if isinstance(attend, DilatedAttention):
        return Shared(attend, SharedDilated(attend, group))
    if isinstance(attend, BlockSparseAttention):
        return Shared(attend, SharedBlockSparse(attend, group))
    return Shared(attend, RingAttention(group))


def alone(attend: Attend) -> Attend:
    """Return the attention that was passed to `shared`."""
    return attend.alone if isinstance(attend, Shared) else attend


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
