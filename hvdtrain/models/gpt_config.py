"""Sizes of a GPT, separate from the model so that they can be checked without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.config_tiers import basic, expert
from hvdtrain.errors import require

# The widths of Llama's MLPs are multiples of this, so that matrices are aligned.
_SWIGLU_MULTIPLE = 256


@dataclass
class AttentionConfig:
    """Which earlier tokens a token attends to.

    Args:
        pattern: `full`: all earlier tokens; `dilated`: every n-th token of its segment (LongNet,
            arXiv:2307.02486); `block_sparse`: the preceding blocks and the first blocks
        segment_lengths: for `dilated`: tokens per segment, for each pattern
        dilation_rates: for `dilated`: each pattern uses every N-th token of a segment
        block_size: for `block_sparse`: tokens per block
        local_blocks: for `block_sparse`: blocks that a token attends to, its own and preceding ones
        global_blocks: for `block_sparse`: blocks at the beginning that all tokens attend to
    """

    pattern: Literal["full", "dilated", "block_sparse"] = "full"
    segment_lengths: list[int] = expert(factory=list)
    dilation_rates: list[int] = expert(factory=list)
    block_size: int = expert(64)
    local_blocks: int = expert(4)
    global_blocks: int = expert(1)


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
        attention: which earlier tokens a token attends to
    """

    layers: int = basic(4)
    heads: int = basic(4)
    kv_heads: int | None = None
    width: int = basic(128)
    context: int = basic(128)
    vocab_size: int | None = None
    positions: Literal["rotary", "learned"] = "rotary"
    rotary_base: float = expert(10000.0)
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = expert(1e-5)
    mlp: Literal["gelu", "swiglu"] = "gelu"
    mlp_width: int | None = None
    bias: bool = True
    dropout: float = 0.0
    tied_embeddings: bool = True
    attention: AttentionConfig = field(default_factory=AttentionConfig)

    def __post_init__(self) -> None:
        if isinstance(self.attention, Mapping):  # of a JSON file
            self.attention = AttentionConfig(**self.attention)
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
            self.attention.pattern == "full" or self.dropout == 0,
            f"model.attention.pattern {self.attention.pattern} has no dropout: set model.dropout 0",
        )
        _check_dilated(self.attention, self.context)
        _check_block_sparse(self.attention, self.context)

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


def _check_dilated(config: AttentionConfig, context: int) -> None:
    lengths, rates = config.segment_lengths, config.dilation_rates
    if config.pattern != "dilated":
        require(
            not lengths and not rates,
            "model.attention.segment_lengths and dilation_rates are for model.attention.pattern "
            f"dilated, not for {config.pattern}",
        )
        return
    require(
        len(lengths) == len(rates) and len(lengths) > 0,
        "model.attention.pattern dilated needs as many model.attention.segment_lengths as "
        f"dilation_rates, not {len(lengths)} and {len(rates)}",
    )
    for length, rate in zip(lengths, rates, strict=True):
        require(
            length >= 1 and context % length == 0,
            f"model.attention.segment_lengths: {length} does not divide model.context {context}",
        )
        require(
            rate >= 1 and length % rate == 0,
            f"model.attention.dilation_rates: {rate} does not divide its segment of {length} "
            "tokens",
        )
    require(
        1 in rates,
        f"model.attention.dilation_rates {rates} needs a 1: otherwise no pattern covers some "
        "tokens",
    )


def _check_block_sparse(config: AttentionConfig, context: int) -> None:
    require(
        config.local_blocks >= 1 and config.global_blocks >= 0,
        "model.attention.local_blocks must be >= 1 and model.attention.global_blocks >= 0, not "
        f"{config.local_blocks} and {config.global_blocks}",
    )
    require(
        config.block_size >= 1, f"model.attention.block_size must be >= 1, not {config.block_size}"
    )
    require(
        config.pattern != "block_sparse" or context % config.block_size == 0,
        f"model.attention.block_size {config.block_size} does not divide model.context {context}",
    )
