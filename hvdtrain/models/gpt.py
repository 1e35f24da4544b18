"""A GPT: decoder-only transformer, pre-norm.

Architecture and initialisation follow GPT-2 (Radford et al., 2019, "Language
Models are Unsupervised Multitask Learners"): weights ~ N(0, 0.02), those that
write into the residual stream scaled by 1/sqrt(2 layers), biases 0.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hvdtrain.models.gpt_config import GPTConfig

ROTARY_BASE = 10000.0


def rotary_tables(context: int, head_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotation angles, each of shape (context, head_size), float32."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of channels of `x` (batch, heads, time, head_size) by their position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


# (q, k, v, probability of dropout) -> y, each of shape (batch, heads, time, head_size).
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Each position attends to itself and those before it."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Attention(nn.Module):
    """Multi-head self-attention.

    Its projections are apart, and the number of heads follows from their rows, so that they can be
    split by heads.
    """

    def __init__(self, config: GPTConfig, attend: Attend) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        self.dropout = config.dropout
        self.attend = attend
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            project(x).view(batch, time, -1, self.head_size).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        y = self.attend(q, k, v, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, config: GPTConfig, attend: Attend) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config, attend)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), rotary))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT(nn.Module):
    """The language model.

    Its parameters are initialised from torch's seed (`torch.manual_seed`). One that is made on the
    meta device gets memory by `to_empty`, and its values by `initialise`.

    Args:
        config: sizes; `vocab_size` must be set.
        attend: what attention computes.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, attend: Attend = causal_attention) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = (
            nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        )
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        tied = config.tied_embeddings
        self.head = None if tied else nn.Linear(config.width, config.vocab_size, bias=False)
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        if not self.norm.weight.is_meta:
            self.initialise(torch.initial_seed())

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Gives each parameter its first value, which follows from the seed and its name alone."""
        device = self.norm.weight.device
        tables = rotary_tables(self.config.context, self.config.width // self.config.heads)
        self.cos, self.sin = (table.to(device) for table in tables)
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(self.config, name, parameter.shape, seed))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: (batch, time) int64, time <= context.

        Returns:
            (batch, time, vocab_size) in the parameters' dtype.
        """
        time = tokens.shape[1]
        x = self.embedding(tokens)
        rotary = None
        if self.positions is None:
            rotary = (self.cos[:time], self.sin[:time])
        else:
            x = x + self.positions.weight[:time]
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, rotary)
        head = self.embedding if self.head is None else self.head
        return F.linear(self.norm(x), head.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token, a scalar; arguments (batch, time) int64."""
        logits = self(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @staticmethod
    def upgrade_checkpoint(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a checkpoint by the names of now: q, k and v were one matrix once.

        Args:
            tensors: parameters by name, or the optimizer's tensors as "name/entry".
        """
        upgraded = {}
        for name, tensor in tensors.items():
            fused = re.search(r"\.attention\.(qkv)\.", name)
            # The optimizer counts its steps in a scalar.
            parts = tensor.chunk(3) if fused and tensor.dim() else (tensor,) * 3
            for letter, part in zip("qkv", parts, strict=True):
                key = (
                    name
                    if fused is None
                    else f"{name[: fused.start(1)]}{letter}{name[fused.end(1) :]}"
                )
                upgraded[key] = tensor if fused is None else part.clone()
        return upgraded


def initial_value(config: GPTConfig, name: str, shape: torch.Size, seed: int) -> Tensor:
    """The first value of a parameter of a GPT, float32 on the CPU.

    Args:
        name: as `named_parameters` has it.
        shape: of the whole parameter.
    """
    if name.endswith("bias"):
        return torch.zeros(shape, device="cpu")
    if name.rpartition(".")[0].rpartition(".")[2].startswith("norm"):
        return torch.ones(shape, device="cpu")
    into_residual = name.endswith(("attention.out.weight", "down.weight"))
    std = 0.02 / (2 * config.layers) ** 0.5 if into_residual else 0.02
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, device="cpu").normal_(std=std, generator=generator)
