"""A GPT's weights and sizes as Hugging Face's transformers has them.

With learned positions it is GPT-2, with rotary ones GPT-NeoX whose attention and MLP follow each
other. https://huggingface.co/docs/transformers/model_doc/gpt2 and .../gpt_neox
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hvdtrain.errors import UserError
from hvdtrain.models.gpt import ROTARY_BASE
from hvdtrain.models.gpt_config import GPTConfig

_ACTIVATION = "gelu_pytorch_tanh"


def to_huggingface(
    config: GPTConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json, tensors of model.safetensors).

    Args:
        config: `vocab_size` must be set.
        weights: of a GPT, by the names of now (`GPT.upgrade_checkpoint`).
    """
    of = _gpt2 if config.positions == "learned" else _gpt_neox
    facts, tensors = of(config, weights)
    facts |= {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": str(weights["embedding.weight"].dtype).removeprefix("torch."),
    }
    return facts, {name: tensor.contiguous() for name, tensor in tensors.items()}


def _gpt2(
    config: GPTConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    facts = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": 4 * config.width,
        "activation_function": _ACTIVATION,
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
        for name, kind in _PARAMETERS:
            parts = [weights[f"{ours}.attention.{letter}.{name}"] for letter in "qkv"]
            tensors[f"{theirs}.attn.c_attn.{name}"] = _transposed(torch.cat(parts), kind)
            for there, here in (
                ("attn.c_proj", "attention.out"), ("mlp.c_fc", "up"), ("mlp.c_proj", "down"),
            ):  # fmt: skip
                tensor = weights[f"{ours}.{here}.{name}"]
                tensors[f"{theirs}.{there}.{name}"] = _transposed(tensor, kind)
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = weights["head.weight"]
    return facts, tensors


def from_gpt2(
    config: GPTConfig, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights of a GPT-2 of transformers by the names of a GPT.

    Args:
        config: of the GPT.
        facts: config.json.
        tensors: of model.safetensors; with or without the prefix of the model with a head.

    Raises:
        UserError: it is of another layout, or has another number of heads.
    """
    if facts["model_type"] != "gpt2":
        raise UserError(
            f"config.json is of {facts['model_type']!r}; of Hugging Face's layouts, that of gpt2 "
            "is read"
        )
    if facts.get("n_head") != config.heads:
        raise UserError(
            f"the GPT-2 has {facts.get('n_head')} heads (n_head), and model.heads is {config.heads}"
        )
    found = {}
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix("transformer.")
        if re.fullmatch(r"h\.\d+\.attn\.(masked_)?bias", name):
            continue  # the mask, which older versions saved
        if name == "lm_head.weight" and config.tied_embeddings:
            continue
        matrix = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        for theirs, ours in _GPT2_NAMES:
            name = re.sub(theirs, ours, name)
        own = tensor.t().contiguous() if matrix else tensor
        parts = own.chunk(3) if "{qkv}" in name else (own,)
        for letter, part in zip("qkv", parts, strict=False):
            found[name.replace("{qkv}", letter)] = part
    return found


_GPT2_NAMES = (
    (r"^wte\.", "embedding."),
    (r"^wpe\.", "positions."),
    (r"^ln_f\.", "norm."),
    (r"^lm_head\.", "head."),
    (r"^h\.", "blocks."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.attn\.c_attn\.", ".attention.{qkv}."),
    (r"\.attn\.c_proj\.", ".attention.out."),
    (r"\.mlp\.c_fc\.", ".up."),
    (r"\.mlp\.c_proj\.", ".down."),
)


def _gpt_neox(
    config: GPTConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    facts = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": 4 * config.width,
        "hidden_act": _ACTIVATION,
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "rotary_emb_base": ROTARY_BASE,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROTARY_BASE,
            "partial_rotary_factor": 1.0,
        },
        "layer_norm_eps": 1e-5,
        "attention_dropout": config.dropout,
        "hidden_dropout": config.dropout,
    }
    tensors = {
        "gpt_neox.embed_in.weight": weights["embedding.weight"],
        **_layer("gpt_neox.final_layer_norm", weights, "norm"),
    }
    heads = config.heads
    for number in range(config.layers):
        ours, theirs = f"blocks.{number}", f"gpt_neox.layers.{number}"
        tensors |= _layer(f"{theirs}.input_layernorm", weights, f"{ours}.norm1")
        tensors |= _layer(f"{theirs}.post_attention_layernorm", weights, f"{ours}.norm2")
        tensors |= _layer(f"{theirs}.attention.dense", weights, f"{ours}.attention.out")
        tensors |= _layer(f"{theirs}.mlp.dense_h_to_4h", weights, f"{ours}.up")
        tensors |= _layer(f"{theirs}.mlp.dense_4h_to_h", weights, f"{ours}.down")
        for name, _ in _PARAMETERS:
            # The rows of a head's q, k and v follow each other.
            parts = [weights[f"{ours}.attention.{letter}.{name}"] for letter in "qkv"]
            by_head = [part.unflatten(0, (heads, -1)) for part in parts]
            fused = torch.stack(by_head, dim=1).flatten(0, 2)
            tensors[f"{theirs}.attention.query_key_value.{name}"] = fused
    if not config.tied_embeddings:
        tensors["embed_out.weight"] = weights["head.weight"]
    return facts, tensors


_PARAMETERS = (("weight", True), ("bias", False))  # name, whether it is a matrix


def _layer(theirs: str, weights: Mapping[str, Tensor], ours: str) -> dict[str, Tensor]:
    return {f"{theirs}.{name}": weights[f"{ours}.{name}"] for name, _ in _PARAMETERS}


def _transposed(tensor: Tensor, matrix: bool) -> Tensor:
    """GPT-2's layers have their input in the rows."""
    return tensor.t() if matrix else tensor
