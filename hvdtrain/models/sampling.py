"""Text, token by token: each is drawn from what a language model predicts after those before it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hvdtrain.models.vocabulary import whole

if TYPE_CHECKING:
    from hvdtrain.models.gpt import GPT


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        length: tokens that are written
        temperature: logits are divided by it; 0 = always the likeliest token
        seed: of the draws
        max_seconds: text that takes longer ends there
    """

    length: int = 200
    temperature: float = 0.8
    seed: int = 0
    max_seconds: float = float("inf")


@torch.no_grad()
def continue_tokens(
    model: GPT,
    tokens: Sequence[int],
    vocab_size: int,
    sampling: Sampling,
    separator: int | None = None,
) -> list[int]:
    """`tokens` (at least one) and those that the model, in its present mode, writes after them.

    Args:
        vocab_size: no token beyond is drawn, though the embedding may have more rows.
        separator: a token that begins a document, which does not see what stands before it; None:
            all is one document.
    """
    device = next(model.parameters()).device
    written = torch.tensor([list(tokens)], device=device)
    begin = 0  # of the document that is being written
    if separator in tokens:
        begin = len(tokens) - 1 - tokens[::-1].index(separator)
    generator = torch.Generator().manual_seed(sampling.seed)
    deadline = time.monotonic() + sampling.max_seconds
    for _ in range(sampling.length):
        seen = written[:, max(begin, written.shape[1] - model.config.context) :]
        logits = whole(model(seen))[0, -1, :vocab_size].float().cpu()
        if sampling.temperature > 0:
            shares = (logits / sampling.temperature).softmax(-1)
            chosen = torch.multinomial(shares, 1, generator=generator)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        if int(chosen) == separator:
            begin = written.shape[1]
        written = torch.cat((written, chosen.to(device)[None]), dim=1)
        if time.monotonic() > deadline:
            break
    return [int(token) for token in written[0]]
