"""Names of a GPT's tensors in other programs: tables of regular expressions, and how to split.

https://huggingface.co/docs/transformers (gpt2, llama), https://github.com/pytorch/torchtitan
(models/llama3) and https://github.com/NVIDIA/Megatron-LM (megatron/legacy/model and
megatron/core/models/gpt).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdtrain.errors import UserError
from hvdtrain.models.gpt_config import GPTConfig

MEGATRON = "megatron"


def _same(tensor: Tensor, config: GPTConfig) -> Sequence[Tensor]:
    return (tensor,)


@dataclass(frozen=True)
class Rename:
    r"""One row of a table.

    Args:
        pattern: matches the whole name of a tensor, without the table's prefix.
        names: names of a GPT, in which \1 stands for the pattern's first group; none: the tensor
            is not used.
        split: (tensor, configuration of the GPT) -> a tensor for each of `names`.
    """

    pattern: str
    names: tuple[str, ...]
    split: Callable[[Tensor, GPTConfig], Sequence[Tensor]] = _same


@dataclass(frozen=True)
class NameTable:
    """How another program names a GPT's tensors.

    Args:
        prefix: pattern of prefixes that names may have.
        rows: the first row that matches a name counts; a tensor without a row keeps its name.
    """

    prefix: str
    rows: tuple[Rename, ...]

    def matches(self, names: Sequence[str]) -> bool:
        """Whether more than half of these names are names of this table."""
        return sum(self._row(name) is not None for name in names) > len(names) / 2

    def rename(self, config: GPTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with the names of a GPT.

        A last layer that equals the embedding is omitted if the GPT uses its embedding.

        Raises:
            UserError: a tensor cannot be split as its row requires.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            row = self._row(name)
            if row is None:
                found[name] = tensor
            elif row.names:
                bare = self._bare(name)
                own = [re.sub(row.pattern, to, bare) for to in row.names]
                try:
                    found |= zip(own, row.split(tensor, config), strict=True)
                except (RuntimeError, ValueError):
                    raise UserError(
                        f"{name} of shape {list(tensor.shape)} cannot be split into "
                        f"{' and '.join(own)} of a model with {config.heads} model.heads and "
                        f"{config.key_heads} model.kv_heads of {config.head_size} channels"
                    ) from None
        head, embedding = found.get("head.weight"), found.get("embedding.weight")
        tied = config.tied_embeddings and head is not None and embedding is not None
        if tied and torch.equal(head, embedding):  # type: ignore[arg-type]
            del found["head.weight"]
        return found

    def _bare(self, name: str) -> str:
        return re.sub(rf"^(?:{self.prefix})", "", name)

    def _row(self, name: str) -> Rename | None:
        bare = self._bare(name)
        return next((row for row in self.rows if re.fullmatch(row.pattern, bare)), None)


def to_gpt_names(
    config: GPTConfig, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename the weights of torchtitan, Megatron-LM or transformers, recognized by their names.

    Args:
        config: configuration of the GPT.
        facts: arguments of Megatron-LM, if known; see `check_megatron`.
        tensors: also with a GPT's own names, which stay.

    Raises:
        UserError: a tensor cannot be split, or Megatron's arguments differ.
    """
    if facts.get("model_type") == MEGATRON:
        _check_megatron(config, facts)
    tables = (TORCHTITAN, LLAMA, GPT2, megatron(gated=config.mlp == "swiglu"))
    table = next((table for table in tables if table.matches([*tensors])), None)
    return dict(tensors) if table is None else table.rename(config, tensors)


def check_facts(facts: Iterable[tuple[str, Any, str, Any]], where: str = "config.json") -> None:
    """Compare settings that have no weights but change the result.

    Args:
        facts: (name in config.json, value there, key of hvdtrain, its value).
        where: the source of the names.

    Raises:
        UserError: two values differ.
    """
    wrong = [
        f"{name} is {theirs} in {where}, and {key} is {ours}"
        for name, theirs, key, ours in facts
        if theirs != ours
    ]
    if wrong:
        raise UserError("; ".join(wrong))


def _check_megatron(config: GPTConfig, facts: Mapping[str, Any]) -> None:
    heads = facts.get("num_attention_heads", config.heads)
    groups = facts.get("num_query_groups") if facts.get("group_query_attention") else heads
    epsilon = facts.get("norm_epsilon", facts.get("layernorm_epsilon", config.norm_eps))
    rotary = facts.get("position_embedding_type") == "rope"
    found = [
        ("num_attention_heads", heads, "model.heads", config.heads),
        ("num_query_groups", groups, "model.kv_heads", config.key_heads),
        ("norm_epsilon", epsilon, "model.norm_eps", config.norm_eps),
    ]
    if rotary:
        percent = facts.get("rotary_percent", 1.0)
        found += [
            (
                "rotary_base",
                facts.get("rotary_base", 10000),
                "model.rotary_base",
                config.rotary_base,
            ),
            ("rotary_percent", percent, "the one of model.positions rotary", 1.0),
            (
                "rotary_interleaved",
                facts.get("rotary_interleaved", False),
                "the one of model.positions rotary",
                False,
            ),
        ]
    check_facts(found, "Megatron's arguments")


# --- how to split -------------------------------------------------------------


def _transposed(tensor: Tensor, config: GPTConfig) -> Sequence[Tensor]:
    """A matrix whose rows are inputs; a bias is unchanged."""
    return (tensor.t().contiguous() if tensor.dim() == 2 else tensor,)


def _transposed_thirds(tensor: Tensor, config: GPTConfig) -> Sequence[Tensor]:
    """q, k and v of the same size, one after another, of a matrix whose rows are inputs."""
    return _transposed(tensor, config)[0].chunk(3)


def _halves(tensor: Tensor, config: GPTConfig) -> Sequence[Tensor]:
    """Two matrices of the same size, one after another."""
    return tensor.chunk(2)


def _by_group(tensor: Tensor, config: GPTConfig) -> Sequence[Tensor]:
    """For each head of keys: its heads of queries, the head of keys, the head of values."""
    queries, size = config.heads // config.key_heads, config.head_size
    groups = tensor.reshape(config.key_heads, queries + 2, size, *tensor.shape[1:])
    return [part.flatten(0, 2) for part in groups.split([queries, 1, 1], dim=1)]


def _from_pairs(tensor: Tensor, config: GPTConfig) -> Sequence[Tensor]:
    """Rows of q or k whose rotary positions turn channels 2i and 2i + 1 of a head.

    A GPT turns channels i and i + size / 2.
    """
    heads = tensor.reshape(-1, config.head_size // 2, 2, *tensor.shape[1:])
    return (heads.transpose(1, 2).reshape(tensor.shape),)


def _by_group_from_pairs(tensor: Tensor, config: GPTConfig) -> Sequence[Tensor]:
    """As `_by_group`, with rows of q and k as in `_from_pairs`."""
    q, k, v = _by_group(tensor, config)
    return [*_from_pairs(q, config), *_from_pairs(k, config), v]


# --- tables -------------------------------------------------------------------

_KIND = r"(weight|bias)"
_QKV = tuple(rf"blocks.\1.attention.{letter}.\2" for letter in "qkv")

GPT2 = NameTable(
    r"(?:transformer\.)?",
    (
        Rename(r"wte\.weight", ("embedding.weight",)),
        Rename(r"wpe\.weight", ("positions.weight",)),
        Rename(rf"ln_f\.{_KIND}", (r"norm.\1",)),
        Rename(r"lm_head\.weight", ("head.weight",)),
        Rename(rf"h\.(\d+)\.ln_([12])\.{_KIND}", (r"blocks.\1.norm\2.\3",)),
        Rename(rf"h\.(\d+)\.attn\.c_attn\.{_KIND}", _QKV, _transposed_thirds),
        Rename(rf"h\.(\d+)\.attn\.c_proj\.{_KIND}", (r"blocks.\1.attention.out.\2",), _transposed),
        Rename(rf"h\.(\d+)\.mlp\.c_fc\.{_KIND}", (r"blocks.\1.up.\2",), _transposed),
        Rename(rf"h\.(\d+)\.mlp\.c_proj\.{_KIND}", (r"blocks.\1.down.\2",), _transposed),
        Rename(r"h\.\d+\.attn\.(masked_)?bias", ()),  # the mask, saved by older versions
    ),
)

# Modules of a block: Llama's name -> GPT's name.
LLAMA_MODULES = {
    "input_layernorm": "norm1",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "norm2",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
LLAMA = NameTable(
    r"(?:model\.)?",
    (
        Rename(r"embed_tokens\.weight", ("embedding.weight",)),
        Rename(r"norm\.weight", ("norm.weight",)),
        Rename(r"lm_head\.weight", ("head.weight",)),
        Rename(r".*rotary_emb\.inv_freq", ()),
        *(
            Rename(rf"layers\.(\d+)\.{re.escape(theirs)}\.{_KIND}", (rf"blocks.\1.{ours}.\2",))
            for theirs, ours in LLAMA_MODULES.items()
        ),
    ),
)

TORCHTITAN = NameTable(
    r"(?:model\.|module\.|_orig_mod\.)*",
    (
        Rename(r"tok_embeddings\.weight", ("embedding.weight",)),
        Rename(r"norm\.weight", ("norm.weight",)),
        Rename(r"(?:lm_head|output)\.weight", ("head.weight",)),  # output: up to 0.2
        Rename(r"freqs_cis|rope\.cache", ()),
        Rename(
            r"layers\.(\d+)\.attention\.(?:qkv_linear\.)?w([qk])\.weight",
            (r"blocks.\1.attention.\2.weight",),
            _from_pairs,
        ),
        Rename(
            r"layers\.(\d+)\.attention\.(?:qkv_linear\.)?wv\.weight",
            (r"blocks.\1.attention.v.weight",),
        ),
        Rename(  # since 0.3 of an optimizer: weights are split when they are saved
            r"layers\.(\d+)\.attention\.qkv_linear\.wqkv\.weight",
            tuple(rf"blocks.\1.attention.{letter}.weight" for letter in "qkv"),
            _by_group_from_pairs,
        ),
        *(
            Rename(rf"layers\.(\d+)\.{re.escape(theirs)}\.weight", (rf"blocks.\1.{ours}.weight",))
            for theirs, ours in (
                ("attention.wo", "attention.out"),
                ("attention_norm", "norm1"),
                ("ffn_norm", "norm2"),
                ("feed_forward.w1", "gate"),
                ("feed_forward.w2", "down"),
                ("feed_forward.w3", "up"),
            )
        ),
    ),
)


def megatron(gated: bool) -> NameTable:
    """Table of Megatron-LM: its legacy models, and those of Megatron Core.

    Args:
        gated: the first matrix of an MLP is gate and up (swiglu).
    """
    layer = r"(?:encoder|transformer|decoder)\.layers\.(\d+)\."
    inner = (r"blocks.\1.gate.\2", r"blocks.\1.up.\2") if gated else (r"blocks.\1.up.\2",)
    return NameTable(
        r"(?:model\.|module\.|language_model\.)*",
        (
            Rename(r"embedding\.word_embeddings\.weight", ("embedding.weight",)),
            Rename(r"embedding\.position_embeddings\.weight", ("positions.weight",)),
            Rename(
                rf"(?:encoder|transformer|decoder)\.final_(?:layer)?norm\.{_KIND}", (r"norm.\1",)
            ),
            Rename(r"output_layer\.weight", ("head.weight",)),
            Rename(r".*(_extra_state|inv_freq)", ()),
            Rename(rf"{layer}input_(?:layer)?norm\.{_KIND}", (r"blocks.\1.norm1.\2",)),
            Rename(
                rf"{layer}self_attention\.linear_qkv\.layer_norm_{_KIND}", (r"blocks.\1.norm1.\2",)
            ),
            Rename(
                rf"{layer}(?:self_)?attention\.(?:query_key_value|linear_qkv)\.{_KIND}",
                _QKV,
                _by_group,
            ),
            Rename(
                rf"{layer}(?:self_)?attention\.(?:dense|linear_proj)\.{_KIND}",
                (r"blocks.\1.attention.out.\2",),
            ),
            Rename(
                rf"{layer}(?:post_attention|pre_mlp)_(?:layer)?norm\.{_KIND}",
                (r"blocks.\1.norm2.\2",),
            ),
            Rename(rf"{layer}mlp\.linear_fc1\.layer_norm_{_KIND}", (r"blocks.\1.norm2.\2",)),
            Rename(
                rf"{layer}mlp\.(?:dense_h_to_4h|linear_fc1)\.{_KIND}",
                inner,
                _halves if gated else _same,
            ),
            Rename(rf"{layer}mlp\.(?:dense_4h_to_h|linear_fc2)\.{_KIND}", (r"blocks.\1.down.\2",)),
        ),
    )
