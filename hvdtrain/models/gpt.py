"""A GPT: decoder-only transformer, pre-norm.

Architecture and initialization follow GPT-2 (Radford et al., 2019, "Language Models are
Unsupervised Multitask Learners"): weights ~ N(0, 0.02), weights that write into the residual stream
scaled by 1/sqrt(2 layers), biases 0. With rotary positions, RMSNorm, SwiGLU and no biases it has
Llama's architecture (Touvron et al., arXiv:2307.09288).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hvdtrain.errors import UserError
from hvdtrain.models.attention import Attend, attention_of, causal_attention, dropped_attention
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.vocabulary import cross_entropy

Split = Callable[[Tensor, int], Tensor]


class Attention(nn.Module):
    """Multi-head or grouped-query self-attention.

    Its projections are separate, and the numbers of heads are derived from their rows, so that the
    projections can be split by heads.
    """

    def __init__(self, config: GPTConfig, attend: Attend) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.attend = attend
        self.part = (0, 1)
        keys = config.key_heads * config.head_size
        self.q = nn.Linear(config.width, config.width, bias=config.bias)
        self.k = nn.Linear(config.width, keys, bias=config.bias)
        self.v = nn.Linear(config.width, keys, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, documents: Tensor | None
    ) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            project(x).view(batch, time, -1, self.head_size).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if self.dropout and self.training and self.part != (0, 1):
            y = dropped_attention(q, k, v, self.dropout, documents, self.part)
        else:
            y = self.attend(q, k, v, self.dropout if self.training else 0.0, documents)
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))

    def set_tensor_part(self, rank: int, size: int) -> None:
        """Set which of `size` equal parts of the heads the projections hold."""
        if self.dropout and size > 1 and self.attend is not causal_attention:
            raise UserError(
                "model.dropout > 0 with parallel.tensor needs full attention: the ranks could not "
                "drop what one rank alone drops"
            )
        self.part = rank, size


def _norm(config: GPTConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return kind(config.width, eps=config.norm_eps)


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig, attend: Attend) -> None:
        super().__init__()
        width, inner = config.width, config.inner_width
        self.norm1 = _norm(config)
        self.attention = Attention(config, attend)
        self.norm2 = _norm(config)
        self.gate = nn.Linear(width, inner, bias=config.bias) if config.mlp == "swiglu" else None
        self.up = nn.Linear(width, inner, bias=config.bias)
        self.down = nn.Linear(inner, width, bias=config.bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, documents: Tensor | None
    ) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), rotary, documents))
        return x + self.drop(self.down(self._inside(self.norm2(x))))

    def _inside(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return F.gelu(self.up(x), approximate="tanh")
        return F.silu(self.gate(x)) * self.up(x)


class GPT(nn.Module):
    """The language model.

    Its parameters are initialized from torch's seed (`torch.manual_seed`). A model created on the
    meta device gets memory from `to_empty` and values from `initialize`.

    Args:
        config: sizes; `vocab_size` must be set.
        attend: attention function; None: as set by `config.attention`.

    Attributes:
        split: (a tensor, the dimension of its tokens) -> the tokens that this rank computes, if
            ranks share each sequence; None: this rank computes all tokens.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, attend: Attend | None = None) -> None:
        super().__init__()
        assert config.vocab_size is not None
        attend = attend or attention_of(config)
        self.config = config
        self.split: Split | None = None
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = (
            nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        )
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = _norm(config)
        tied = config.tied_embeddings
        self.head = None if tied else nn.Linear(config.width, config.vocab_size, bias=False)
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        if not self.embedding.weight.is_meta:
            self.initialize(torch.initial_seed())

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initialize each parameter to a value that depends only on the seed and its name."""
        device = next(self.parameters()).device  # a stage of a pipeline has no embedding
        self.cos, self.sin = (table.to(device) for table in rotary_tables(self.config))
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(self.config, name, parameter.shape, seed))

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: (batch, time) int64, time <= context.
            documents: (batch, time), ascending numbers of the documents packed into a sequence;
                each document is computed independently. None: a sequence is one document.

        Returns:
            (batch, time, vocab_size) in the parameters' dtype; with tensor parallelism a DTensor.
            If ranks share a sequence, only this rank's tokens.
        """
        x = self.embed(tokens, documents)
        for block in self.blocks:
            x = self.apply_block(block, x, tokens, documents)
        return self.output(x, tokens, documents)

    # Modules of the pipeline stages, see parallel/cut.py.
    first_stage = ("embedding", "positions")

    @property
    def last_stage(self) -> tuple[str, ...]:
        """Modules that `output` uses."""
        return ("norm", "embedding" if self.head is None else "head")

    def embed(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Input of the first block: (batch, time, width)."""
        x = self.embedding(self.local(tokens))
        if self.positions is not None and documents is None:
            x = x + self.local(self.positions.weight[: tokens.shape[1]], 0)
        elif self.positions is not None and documents is not None:
            x = x + self.positions.weight[self.local(positions_in_documents(documents))]
        return self.drop(x)

    def apply_block(
        self, block: nn.Module, x: Tensor, tokens: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Apply one of `blocks`: (batch, time, width) to the same shape."""
        time, rotary = tokens.shape[1], None
        if self.positions is None:
            rotary = (self.local(self.cos[:time], 0), self.local(self.sin[:time], 0))
        return block(x, rotary, documents)

    def output(self, x: Tensor, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits from the output of the last block."""
        head = self.embedding if self.head is None else self.head
        return F.linear(self.norm(x), head.weight)

    def local(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of `x`, whose dimension `dim` is the tokens of a sequence."""
        return x if self.split is None else self.split(x, dim)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None = None,
        of_samples: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats per token, a scalar; arguments (batch, time) int64.

        If ranks share a sequence, it is this rank's share; the shares add up to the mean.

        Args:
            of_samples: (batch,) float64, receives the sum over each sample's tokens, without a
                gradient; also this rank's share.
        """
        local = self.local(targets)
        each = None if of_samples is None else torch.empty_like(local, dtype=torch.float32)
        mean = cross_entropy(self(tokens, documents), local, each)
        if of_samples is not None and each is not None:
            of_samples.copy_(each.double().sum(dim=1))
        return mean if self.split is None else mean * (local.numel() / targets.numel())

    def set_tensor_part(self, rank: int, size: int) -> None:
        """Raise UserError if `size` ranks cannot split the heads and the MLP."""
        try:
            self.config.check_tensor(size)
        except ValueError as error:
            raise UserError(str(error)) from None

    def tensor_plan(self) -> dict[str, str]:
        """How ranks split the model, see `apply_tensor`; the logits are then split, too.

        With dropout the residual stream is replicated on each rank, so that all ranks draw the same
        numbers; without dropout, the stream and the norms are split by sequence.
        """
        whole = self.config.dropout > 0
        norm, row = ("replicated", "row") if whole else ("sequence", "row_to_sequence")
        # Learned positions are plain tensors, which are added to the embedding's output.
        to_sequence = not whole and self.positions is None
        embedding = "vocabulary_to_sequence" if to_sequence else "vocabulary"
        plan = {"embedding": embedding, "norm": norm, "blocks.*.norm?": norm}
        if self.head is not None:
            plan["head"] = "vocabulary"
        plan |= {f"blocks.*.attention.{name}": "column" for name in "qkv"}
        plan |= {"blocks.*.up": "column", "blocks.*.attention.out": row, "blocks.*.down": row}
        if self.config.mlp == "swiglu":
            plan["blocks.*.gate"] = "column"
        if not whole:
            plan |= {f"blocks.{number}": "into_sequence" for number in range(len(self.blocks))}
        return plan


def initial_value(config: GPTConfig, name: str, shape: torch.Size, seed: int) -> Tensor:
    """Initial value of a parameter of a GPT, float32 on the CPU.

    Args:
        name: as in `named_parameters`.
        shape: shape of the whole parameter.
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


# Positions of tokens, and rotary positions for queries and keys.


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
