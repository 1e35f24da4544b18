"""GPT-NeoX's layout: rotary positions, and q, k and v of a head next to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.huggingface.parts import layer


def exported(
    config: GPTConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the layout's own part of config.json, tensors)."""
    facts = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.inner_width,
        "hidden_act": "gelu_pytorch_tanh",
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "rotary_emb_base": config.rotary_base,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rotary_base,
            "partial_rotary_factor": 1.0,
        },
        "layer_norm_eps": config.norm_eps,
        "attention_dropout": config.dropout,
        "hidden_dropout": config.dropout,
    }
    tensors = {
        "gpt_neox.embed_in.weight": weights["embedding.weight"],
        **layer("gpt_neox.final_layer_norm", weights, "norm"),
    }
    for number in range(config.layers):
        ours, theirs = f"blocks.{number}", f"gpt_neox.layers.{number}"
        tensors |= layer(f"{theirs}.input_layernorm", weights, f"{ours}.norm1")
        tensors |= layer(f"{theirs}.post_attention_layernorm", weights, f"{ours}.norm2")
        tensors |= layer(f"{theirs}.attention.dense", weights, f"{ours}.attention.out")
        tensors |= layer(f"{theirs}.mlp.dense_h_to_4h", weights, f"{ours}.up")
        tensors |= layer(f"{theirs}.mlp.dense_4h_to_h", weights, f"{ours}.down")
        for name in ("weight", "bias"):
            parts = [weights[f"{ours}.attention.{letter}.{name}"] for letter in "qkv"]
            by_head = [part.unflatten(0, (config.heads, -1)) for part in parts]
            fused = torch.stack(by_head, dim=1).flatten(0, 2)
            tensors[f"{theirs}.attention.query_key_value.{name}"] = fused
    if not config.tied_embeddings:
        tensors["embed_out.weight"] = weights["head.weight"]
    return facts, tensors
