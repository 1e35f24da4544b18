"""Models that ranks split between them, beside the same model on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.parallel.local import local

BATCH, SEPARATOR = 3, 0


def sizes(**changes: Any) -> GPTConfig:
    """Of a tiny GPT; its vocabulary and its context are odd."""
    standard = {"layers": 2, "heads": 4, "width": 16, "context": 13, "vocab_size": 37}
    return GPTConfig(**(standard | changes))


def gpt(config: GPTConfig) -> GPT:
    torch.manual_seed(1)
    model = GPT(config)
    with torch.no_grad():  # so that no gradient is zero by chance, and no bias
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def tokens_of(config: GPTConfig, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    assert config.vocab_size is not None
    return torch.randint(config.vocab_size, (BATCH, config.context + 1), generator=generator)


def loss_of(model: GPT, tokens: Tensor, packed: bool) -> Tensor:
    documents = (tokens[:, :-1] % 5 == SEPARATOR).cumsum(dim=1) if packed else None
    return model.loss(tokens[:, :-1], tokens[:, 1:], documents)


def trained(
    model: nn.Module, losses: Sequence[Callable[[], Tensor]]
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses and gradients of steps of AdamW, each on one loss; gradients are cloned."""
    parameters = dict(model.named_parameters())
    parts = {name: nn.Parameter(local(p)) for name, p in parameters.items()}
    optimizer = torch.optim.AdamW(parts.values(), lr=1e-2)
    values, gradients = [], []
    for step, loss_of_step in enumerate(losses):
        torch.manual_seed(step)
        model.zero_grad()
        loss = loss_of_step()
        loss.backward()
        values.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in parameters.items()})
        for name, part in parts.items():
            part.grad = local(parameters[name].grad)
        optimizer.step()
    return values, gradients
