"""Conversion of a GPT to and from Hugging Face transformers, in three layouts.

A GPT with learned positions has GPT-2's layout. With rotary positions it has GPT-NeoX's layout,
with attention and MLP in sequence, or, with RMSNorm and SwiGLU, Llama's.
https://huggingface.co/docs/transformers/model_doc/gpt2, .../gpt_neox and .../llama
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hvdtrain.errors import UserError
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.name_tables import GPT2, LLAMA, LLAMA_MODULES, check_facts


def to_huggingface(
    config: GPTConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (config.json, tensors of model.safetensors).

    Args:
        config: `vocab_size` must be set.
        weights: weights of a GPT.

    Raises:
        UserError: transformers has no such model.
    """
    export = {"gpt2": _to_gpt2, "gpt_neox": _to_gpt_neox, "llama": _to_llama}[_layout(config)]
    facts, tensors = export(config, weights)
    facts |= {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": str(weights["embedding.weight"].dtype).removeprefix("torch."),
    }
    return facts, {name: tensor.contiguous() for name, tensor in tensors.items()}


def from_huggingface(
    config: GPTConfig, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename the weights of a transformers model to a GPT's names.

    Args:
        config: configuration of the GPT.
        facts: config.json.
        tensors: tensors of model.safetensors; with or without the prefix of the model with a head.

    Raises:
        UserError: the layout is not supported, or the model differs from the GPT.
    """
    readers = {"gpt2": _from_gpt2, "llama": _from_llama}
    layout = facts["model_type"]
    if layout not in readers:
        raise UserError(
            f"config.json has the layout of {layout!r}; the layouts of {' and '.join(readers)} can "
            "be read"
        )
    return readers[layout](config, facts, tensors)


def _layout(config: GPTConfig) -> str:
    """The layout of the transformers model that computes the same."""
    if config.attention.pattern != "full":
        raise UserError(
            f"transformers has no model with model.attention.pattern {config.attention.pattern}: "
            "it computes full"
        )
    of_gpt = config.norm == "layer" and config.mlp == "gelu" and config.bias
    if of_gpt and config.key_heads == config.heads:
        return "gpt2" if config.positions == "learned" else "gpt_neox"
    if config.positions == "rotary" and config.norm == "rms" and config.mlp == "swiglu":
        return "llama"
    raise UserError(
        "transformers has GPT-2 and GPT-NeoX (model.norm layer, model.mlp gelu, model.bias true, "
        "no model.kv_heads) and Llama (model.positions rotary, model.norm rms, model.mlp swiglu), "
        f"but no model with positions {config.positions}, norm {config.norm}, mlp {config.mlp}, "
        f"bias {str(config.bias).lower()} and {config.key_heads} of {config.heads} kv_heads"
    )


# GPT-2: learned positions, and matrices whose rows are the layer's inputs.

_GPT2_ACTIVATION = "gelu_pytorch_tanh"


def _to_gpt2(
    config: GPTConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the layout's own part of config.json, tensors)."""
    facts = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.inner_width,
        "activation_function": _GPT2_ACTIVATION,
        "layer_norm_epsilon": config.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
    }
    tensors = {
        "transformer.wte.weight": weights["embedding.weight"],
        "transformer.wpe.weight": weights["positions.weight"],
        **_layer("transformer.ln_f", weights, "norm"),
    }
    for number in range(config.layers):
        ours, theirs = f"blocks.{number}", f"transformer.h.{number}"
        tensors |= _layer(f"{theirs}.ln_1", weights, f"{ours}.norm1")
        tensors |= _layer(f"{theirs}.ln_2", weights, f"{ours}.norm2")
        for name in ("weight", "bias"):
            parts = [weights[f"{ours}.attention.{letter}.{name}"] for letter in "qkv"]
            tensors[f"{theirs}.attn.c_attn.{name}"] = _transposed(torch.cat(parts))
            for there, here in (
                ("attn.c_proj", "attention.out"), ("mlp.c_fc", "up"), ("mlp.c_proj", "down"),
            ):  # fmt: skip
                tensors[f"{theirs}.{there}.{name}"] = _transposed(weights[f"{ours}.{here}.{name}"])
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = weights["head.weight"]
    return facts, tensors


def _from_gpt2(
    config: GPTConfig, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename the weights to a GPT's names; see `from_huggingface`."""
    activation = facts.get("activation_function", _GPT2_ACTIVATION)
    if activation == "gelu_new":  # GPT-2's name for it
        activation = _GPT2_ACTIVATION
    epsilon = facts.get("layer_norm_epsilon", 1e-5)
    check_facts(
        [
            ("n_head", facts.get("n_head"), "model.heads", config.heads),
            (
                "activation_function",
                activation,
                "the activation of model.mlp gelu",
                _GPT2_ACTIVATION,
            ),
            ("layer_norm_epsilon", epsilon, "model.norm_eps", config.norm_eps),
        ]
    )
    return GPT2.rename(config, tensors)


def _transposed(tensor: Tensor) -> Tensor:
    """Transpose a matrix, so that its rows are inputs; return a bias unchanged."""
    return tensor.t() if tensor.dim() == 2 else tensor


# GPT-NeoX: rotary positions, and q, k and v of a head next to each other.


def _to_gpt_neox(
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
        **_layer("gpt_neox.final_layer_norm", weights, "norm"),
    }
    for number in range(config.layers):
        ours, theirs = f"blocks.{number}", f"gpt_neox.layers.{number}"
        tensors |= _layer(f"{theirs}.input_layernorm", weights, f"{ours}.norm1")
        tensors |= _layer(f"{theirs}.post_attention_layernorm", weights, f"{ours}.norm2")
        tensors |= _layer(f"{theirs}.attention.dense", weights, f"{ours}.attention.out")
        tensors |= _layer(f"{theirs}.mlp.dense_h_to_4h", weights, f"{ours}.up")
        tensors |= _layer(f"{theirs}.mlp.dense_4h_to_h", weights, f"{ours}.down")
        for name in ("weight", "bias"):
            parts = [weights[f"{ours}.attention.{letter}.{name}"] for letter in "qkv"]
            by_head = [part.unflatten(0, (config.heads, -1)) for part in parts]
            fused = torch.stack(by_head, dim=1).flatten(0, 2)
            tensors[f"{theirs}.attention.query_key_value.{name}"] = fused
    if not config.tied_embeddings:
        tensors["embed_out.weight"] = weights["head.weight"]
    return facts, tensors


# Llama: rotary positions, RMSNorm, SwiGLU, and any number of key heads.


def _to_llama(
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
        for theirs, ours in LLAMA_MODULES.items():
            tensors |= _layer(f"model.layers.{number}.{theirs}", weights, f"blocks.{number}.{ours}")
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = weights["head.weight"]
    return facts, tensors


def _from_llama(
    config: GPTConfig, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename the weights to a GPT's names; see `from_huggingface`."""
    _check_llama(config, facts)
    return LLAMA.rename(config, tensors)


def _check_llama(config: GPTConfig, facts: Mapping[str, Any]) -> None:
    """Compare sizes and settings; defaults are from transformers' LlamaConfig."""
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
            (
                "hidden_act",
                facts.get("hidden_act", "silu"),
                "the activation of model.mlp swiglu",
                "silu",
            ),
            ("rms_norm_eps", facts.get("rms_norm_eps", 1e-6), "model.norm_eps", config.norm_eps),
            ("rope_theta", base, "model.rotary_base", config.rotary_base),
            ("rope_type", kind, "the one of model.positions rotary", "default"),
        ]
    )


# Shared by the layouts.


def _layer(theirs: str, weights: Mapping[str, Tensor], ours: str) -> dict[str, Tensor]:
    """Rename the weight of a layer, and its bias if it has one."""
    named = {f"{theirs}.{name}": f"{ours}.{name}" for name in ("weight", "bias")}
    return {there: weights[here] for there, here in named.items() if here in weights}
