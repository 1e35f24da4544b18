"""Sizes of a GPT, separate from the model so that they can be checked without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.errors import require

# The widths of Llama's MLPs are multiples of this, so that matrices are aligned.
_SWIGLU_MULTIPLE = 256


@dataclass
class GPTConfig:
    """Sizes of the GPT, and the components of its blocks.

    Args:
        layers: transformer blocks
        heads: attention heads
        kv_heads: heads of keys and values, each shared by `model.heads` / `model.kv_heads` heads of
            queries (grouped-query attention, arXiv:2305.13245); null = `model.heads`
        width: size of the residual stream
        context: tokens per sample, and the longest sequence
        vocab_size: rows of the embedding; null = size of the data's vocabulary
        positions: `rotary` (RoFormer, arXiv:2104.09864) or `learned` (GPT-2)
        rotary_base: base of the frequencies of `rotary`
        norm: `layer` (LayerNorm) or `rms` (RMSNorm, arXiv:1910.07467)
        norm_eps: added to the variance in the norm's denominator
        mlp: `gelu` (GPT-2) or `swiglu` (arXiv:2002.05202)
        mlp_width: inner size of the MLP; null = 4 times the width, or with `swiglu` 8/3 of it
            rounded up to a multiple of 256, as in Llama
        bias: whether linear layers in the blocks have biases; Llama's have none
        dropout: fraction of activations dropped after embedding, attention and MLP
        tied_embeddings: the last layer uses the embedding as its matrix
        attention: `full`: a token attends to all earlier tokens; `dilated`: to every n-th token of
            its segment (LongNet, arXiv:2307.02486); `block_sparse`: to the preceding blocks and
            to the first blocks
        segment_lengths: for `dilated`: tokens per segment, for each pattern
        dilation_rates: for `dilated`: each pattern uses every N-th token of a segment
        block_size: for `block_sparse`: tokens per block
        local_blocks: for `block_sparse`: blocks that a token attends to, its own and preceding ones
        global_blocks: for `block_sparse`: blocks at the beginning that all tokens attend to
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
    attention: Literal["full", "dilated", "block_sparse"] = "full"
    segment_lengths: list[int] = field(default_factory=list)
    dilation_rates: list[int] = field(default_factory=list)
    block_size: int = 64
    local_blocks: int = 4
    global_blocks: int = 1

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
        require(
            self.attention == "full" or self.dropout == 0,
            f"model.attention {self.attention} has no dropout: set model.dropout 0",
        )
        _check_dilated(self)
        _check_block_sparse(self)

    @property
    def head_size(self) -> int:
        """Channels per head."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def inner_width(self) -> int:
        """Inner size of the MLP."""
        if self.mlp_width is not None:
            return self.mlp_width
        if self.mlp == "gelu":
            return 4 * self.width
        return -(-8 * self.width // (3 * _SWIGLU_MULTIPLE)) * _SWIGLU_MULTIPLE

    def check_tensor(self, degree: int) -> None:
        """Check that `degree` ranks can split the model.

        Raises:
            ValueError: they cannot; the message names the nearest degree that works.
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


def _check_dilated(config: GPTConfig) -> None:
    lengths, rates = config.segment_lengths, config.dilation_rates
    if config.attention != "dilated":
        require(
            not lengths and not rates,
            "model.segment_lengths and model.dilation_rates are for model.attention dilated, not "
            f"for {config.attention}",
        )
        return
    require(
        len(lengths) == len(rates) and len(lengths) > 0,
        "model.attention dilated needs as many model.segment_lengths as model.dilation_rates, "
        f"not {len(lengths)} and {len(rates)}",
    )
    for length, rate in zip(lengths, rates, strict=True):
        require(
            length >= 1 and config.context % length == 0,
            f"model.segment_lengths: {length} does not divide model.context {config.context}",
        )
        require(
            rate >= 1 and length % rate == 0,
            f"model.dilation_rates: {rate} does not divide its segment of {length} tokens",
        )
    require(
        1 in rates,
        f"model.dilation_rates {rates} needs a 1: otherwise no pattern covers some tokens",
    )


def _check_block_sparse(config: GPTConfig) -> None:
    require(
        config.local_blocks >= 1 and config.global_blocks >= 0,
        "model.local_blocks must be >= 1 and model.global_blocks >= 0, not "
        f"{config.local_blocks} and {config.global_blocks}",
    )
    require(config.block_size >= 1, f"model.block_size must be >= 1, not {config.block_size}")
    require(
        config.attention != "block_sparse" or config.context % config.block_size == 0,
        f"model.block_size {config.block_size} does not divide model.context {config.context}",
    )
