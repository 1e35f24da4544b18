"""Text generation: each token is drawn from a language model's prediction."""

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
    """Options for drawing tokens.

    Args:
        length: number of tokens to generate
        temperature: divisor of the logits; 0 = always the most likely token
        seed: seed of the random numbers
        max_seconds: time limit, after which the text ends
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
    """Return `tokens` (at least one) and the model's continuation, in the model's current mode.

    Args:
        vocab_size: tokens from this number on are never drawn, even if the embedding has more rows.
        separator: a token that begins a document, which does not see earlier tokens; None: all
            tokens are one document.
    """
    device = next(model.parameters()).device
    written = torch.tensor([list(tokens)], device=device)
    begin = 0  # start of the current document
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
