"""A GPT: decoder-only transformer, pre-norm.

Architecture and initialisation follow GPT-2 (Radford et al., 2019, "Language
Models are Unsupervised Multitask Learners"): weights ~ N(0, 0.02), those that
write into the residual stream scaled by 1/sqrt(2 layers), biases 0. With rotary
positions, RMSNorm, SwiGLU and no biases it has Llama's architecture (Touvron et
al., arXiv:2307.09288).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hvdtrain.errors import UserError
from hvdtrain.models.attention import Attend, attention_of, causal_attention
from hvdtrain.models.dropped_attention import dropped_attention
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.positions import positions_in_documents, rotary_tables, rotate
from hvdtrain.models.vocabulary import cross_entropy

Split = Callable[[Tensor, int], Tensor]


class Attention(nn.Module):
    """Multi-head or grouped-query self-attention.

    Its projections are apart, and the numbers of heads follow from their rows, so that they can be
    split by heads.
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
        """Which of `size` equal parts of the heads its projections hold."""
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
    """Attention and MLP, each behind a norm and added to the residual stream."""

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

    Its parameters are initialised from torch's seed (`torch.manual_seed`). One that is made on the
    meta device gets memory by `to_empty`, and its values by `initialise`.

    Args:
        config: sizes; `vocab_size` must be set.
        attend: what attention computes; None: what `config.attention` names.

    Attributes:
        split: (a tensor, the dimension of its tokens) -> the tokens that this rank computes, where
            ranks share each sequence; None: it computes all of them.
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
            self.initialise(torch.initial_seed())

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Gives each parameter its first value, which follows from the seed and its name alone."""
        device = next(self.parameters()).device  # a stage of a pipeline has no embedding
        self.cos, self.sin = (table.to(device) for table in rotary_tables(self.config))
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(self.config, name, parameter.shape, seed))

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: (batch, time) int64, time <= context.
            documents: (batch, time), numbers of the documents that a sequence is packed of, in
                rising order; each is computed as if it stood alone. None: a sequence is one.

        Returns:
            (batch, time, vocab_size) in the parameters' dtype; with tensor parallelism a DTensor.
            Where ranks share a sequence, of the tokens of this rank.
        """
        x = self.embed(tokens, documents)
        for block in self.blocks:
            x = self.apply_block(block, x, tokens, documents)
        return self.output(x, tokens, documents)

    # What a pipeline cuts it by, see parallel/cut.py.
    first_stage = ("embedding", "positions")

    @property
    def last_stage(self) -> tuple[str, ...]:
        """What `output` uses."""
        return ("norm", "embedding" if self.head is None else "head")

    def embed(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """What the first block gets: (batch, time, width)."""
        x = self.embedding(self.local(tokens))
        if self.positions is not None and documents is None:
            x = x + self.local(self.positions.weight[: tokens.shape[1]], 0)
        elif self.positions is not None and documents is not None:
            x = x + self.positions.weight[self.local(positions_in_documents(documents))]
        return self.drop(x)

    def apply_block(
        self, block: nn.Module, x: Tensor, tokens: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """One of `blocks`: (batch, time, width) to the same."""
        time, rotary = tokens.shape[1], None
        if self.positions is None:
            rotary = (self.local(self.cos[:time], 0), self.local(self.sin[:time], 0))
        return block(x, rotary, documents)

    def output(self, x: Tensor, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits of what the last block gave."""
        head = self.embedding if self.head is None else self.head
        return F.linear(self.norm(x), head.weight)

    def local(self, x: Tensor, dim: int = 1) -> Tensor:
        """What this rank computes of `x`, whose dimension `dim` are the tokens of a sequence."""
        return x if self.split is None else self.split(x, dim)

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats a token, a scalar; arguments (batch, time) int64.

        Where ranks share a sequence, it is this rank's part of the mean: theirs add up to it.
        """
        local = self.local(targets)
        mean = cross_entropy(self(tokens, documents), local)
        return mean if self.split is None else mean * (local.numel() / targets.numel())

    def set_tensor_part(self, rank: int, size: int) -> None:
        """Raises UserError where `size` ranks cannot split its heads and its MLP between them."""
        try:
            self.config.check_tensor(size)
        except ValueError as error:
            raise UserError(str(error)) from None

    def tensor_plan(self) -> dict[str, str]:
        """How ranks split it between them, see `apply_tensor`; its logits are split then too.

        With dropout the residual stream is whole on each rank, so that all draw the same numbers;
        without, it and the norms are split by sequence.
        """
        whole = self.config.dropout > 0
        norm, row = ("replicated", "row") if whole else ("sequence", "row_to_sequence")
        # Learned positions are added to what it gives: plain tensors.
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
