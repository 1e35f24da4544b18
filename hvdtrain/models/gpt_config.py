"""The sizes of a GPT, apart from the model so that they can be checked without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import require

# Llama's MLPs are a multiple of this wide, so that matrices are aligned.
_SWIGLU_MULTIPLE = 256


@dataclass
class GPTConfig:
    """Sizes of the GPT, and what its blocks are made of.

    Args:
        layers: transformer blocks
        heads: attention heads
        kv_heads: heads of keys and values, each for `model.heads` / `model.kv_heads` heads of
            queries (grouped-query attention, arXiv:2305.13245); null = `model.heads`
        width: size of the residual stream
        context: tokens of a sample, and the longest sequence
        vocab_size: rows of the embedding; null = as many as the data's vocabulary has
        positions: `rotary` (RoFormer, arXiv:2104.09864) or `learned` (GPT-2)
        rotary_base: the angles of `rotary` are its powers
        norm: `layer` (LayerNorm) or `rms` (RMSNorm, arXiv:1910.07467)
        norm_eps: added to the variance that it divides by
        mlp: `gelu` (GPT-2) or `swiglu` (arXiv:2002.05202)
        mlp_width: size inside of the MLP; null = 4 times the width, with `swiglu` 8/3 of it rounded
            up to a multiple of 256, as in Llama
        bias: linear layers inside of the blocks have biases; Llama's have none
        dropout: fraction of activations dropped after embedding, attention and MLP
        tied_embeddings: the embedding is the last layer's matrix too
    """

    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    width: int = 128
    context: int = 128
    vocab_size: int | None = None
    positions: Literal["rotary", "learned"] = "rotary"
    rotary_base: float = 10000.0
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    mlp: Literal["gelu", "swiglu"] = "gelu"
    mlp_width: int | None = None
    bias: bool = True
    dropout: float = 0.0
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "width", "context", "vocab_size", "mlp_width"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name} must be >= 1")
        for name in ("rotary_base", "norm_eps"):
            require(getattr(self, name) > 0, f"model.{name} must be > 0")
        require(
            self.width % self.heads == 0,
            f"model.width {self.width} is not a multiple of model.heads {self.heads}",
        )
        require(
            self.heads % self.key_heads == 0,
            f"model.heads {self.heads} is not a multiple of model.kv_heads {self.kv_heads}",
        )
        require(
            self.positions != "rotary" or self.head_size % 2 == 0,
            f"rotary positions need an even model.width / model.heads, not {self.head_size}",
        )
        require(0 <= self.dropout < 1, f"model.dropout must lie in [0, 1), not {self.dropout}")

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def inner_width(self) -> int:
        """Size inside of the MLP."""
        if self.mlp_width is not None:
            return self.mlp_width
        if self.mlp == "gelu":
            return 4 * self.width
        return -(-8 * self.width // (3 * _SWIGLU_MULTIPLE)) * _SWIGLU_MULTIPLE

    def check_tensor(self, degree: int) -> None:
        """Whether `degree` ranks can split it between them.

        Raises:
            ValueError: they cannot; with the nearest number of ranks that can.
        """
        sizes = {
            "model.heads": self.heads,
            "model.kv_heads": self.key_heads,
            "model.mlp_width": self.inner_width,
        }
        uneven = [f"{name} {size}" for name, size in sizes.items() if size % degree]
        if not uneven:
            return
        possible = (
            n for n in range(1, self.key_heads + 1) if not any(s % n for s in sizes.values())
        )
        nearest = min(possible, key=lambda n: abs(n - degree))
        raise ValueError(
            f"parallel.tensor {degree} does not divide {' and '.join(uneven)}; "
            f"the nearest that does is {nearest}"
        )
