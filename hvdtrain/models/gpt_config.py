"""The sizes of a GPT, apart from the model so that they can be checked without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import require


@dataclass
class GPTConfig:
    """Sizes of the GPT.

    Args:
        layers: transformer blocks
        heads: attention heads
        width: size of the residual stream
        context: tokens of a sample, and the longest sequence
        vocab_size: rows of the embedding; null = as many as the data's vocabulary has
        positions: `rotary` (RoFormer, arXiv:2104.09864) or `learned` (GPT-2)
        dropout: fraction of activations dropped after embedding, attention and MLP
        tied_embeddings: the embedding is the last layer's matrix too
    """

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 128
    vocab_size: int | None = None
    positions: Literal["rotary", "learned"] = "rotary"
    dropout: float = 0.0
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context"):
            require(getattr(self, name) >= 1, f"model.{name} must be >= 1")
        require(
            self.width % self.heads == 0,
            f"model.width {self.width} is not a multiple of model.heads {self.heads}",
        )
        require(
            self.positions != "rotary" or (self.width // self.heads) % 2 == 0,
            f"rotary positions need an even model.width / model.heads, "
            f"not {self.width // self.heads}",
        )
        require(0 <= self.dropout < 1, f"model.dropout must lie in [0, 1), not {self.dropout}")
        require(self.vocab_size is None or self.vocab_size >= 1, "model.vocab_size must be >= 1")
