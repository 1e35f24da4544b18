"""Llama's layout: rotary positions, RMSNorm, SwiGLU, and any number of key heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.huggingface.parts import check_facts, layer

# Modules of a block: Llama's name -> GPT's name.
_MODULES = {
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
_OUTSIDE = {"embed_tokens": "embedding", "norm": "norm", "lm_head": "head"}


def exported(
    config: GPTConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the layout's own part of config.json, tensors)."""
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.inner_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        # Both the older and the newer format of this layout.
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": config.dropout,
    }
    tensors = {
        "model.embed_tokens.weight": weights["embedding.weight"],
        "model.norm.weight": weights["norm.weight"],
    }
    for number in range(config.layers):
        for theirs, ours in _MODULES.items():
            tensors |= layer(f"model.layers.{number}.{theirs}", weights, f"blocks.{number}.{ours}")
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = weights["head.weight"]
    return facts, tensors


def read(
    config: GPTConfig, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename the weights to a GPT's names; see `from_huggingface`."""
    _check(config, facts)
    found = {}
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix("model.")
        tied = facts.get("tie_word_embeddings", False)
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and tied):
            continue  # derived from the sizes, or equal to the embedding
        module, _, kind = name.rpartition(".")
        inside = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
        if inside and inside[2] in _MODULES:
            module = f"blocks.{inside[1]}.{_MODULES[inside[2]]}"
        found[f"{_OUTSIDE.get(module, module)}.{kind}"] = tensor
    return found


def _check(config: GPTConfig, facts: Mapping[str, Any]) -> None:
    """Compare sizes and settings; defaults are those of transformers' LlamaConfig."""
    heads = facts.get("num_attention_heads", 32)
    rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = rope.get("rope_theta", facts.get("rope_theta", 10000.0))
    check_facts(
        [
            ("num_attention_heads", heads, "model.heads", config.heads),
            (
                "num_key_value_heads",
                facts.get("num_key_value_heads") or heads,
                "model.kv_heads",
                config.key_heads,
            ),
            ("hidden_act", facts.get("hidden_act", "silu"), "that of model.mlp swiglu", "silu"),
            ("rms_norm_eps", facts.get("rms_norm_eps", 1e-6), "model.norm_eps", config.norm_eps),
            ("rope_theta", base, "model.rotary_base", config.rotary_base),
            ("rope_type", kind, "the one of model.positions rotary", "default"),
        ]
    )
