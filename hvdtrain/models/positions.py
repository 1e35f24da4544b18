"""Positions of tokens in their sequence, and rotary positions for queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.models.gpt_config import GPTConfig


def rotary_tables(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotation angles, each of shape (context, head_size), float32."""
    size = config.head_size
    frequencies = config.rotary_base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels of `x` (batch, heads, time, head_size) by their position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def positions_in_documents(documents: Tensor) -> Tensor:
    """The position of each token in its document: (batch, time) int64, from 0.

    Args:
        documents: (batch, time), numbers that change where a document begins.
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = documents.diff(dim=1, prepend=documents[:, :1]) != 0
    return places - torch.where(begins, places, 0).cummax(dim=1).values
