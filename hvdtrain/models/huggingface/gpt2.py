"""GPT-2's layout: learned positions, and matrices whose rows are the layer's inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.huggingface.parts import check_facts, layer

_ACTIVATION = "gelu_pytorch_tanh"


def exported(
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
        "activation_function": _ACTIVATION,
        "layer_norm_epsilon": config.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
    }
    tensors = {
        "transformer.wte.weight": weights["embedding.weight"],
        "transformer.wpe.weight": weights["positions.weight"],
        **layer("transformer.ln_f", weights, "norm"),
    }
    for number in range(config.layers):
        ours, theirs = f"blocks.{number}", f"transformer.h.{number}"
        tensors |= layer(f"{theirs}.ln_1", weights, f"{ours}.norm1")
        tensors |= layer(f"{theirs}.ln_2", weights, f"{ours}.norm2")
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


def read(
    config: GPTConfig, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename the weights to a GPT's names; see `from_huggingface`."""
    activation = facts.get("activation_function", _ACTIVATION)
    if activation == "gelu_new":  # GPT-2's name for it
        activation = _ACTIVATION
    epsilon = facts.get("layer_norm_epsilon", 1e-5)
    check_facts(
        [
            ("n_head", facts.get("n_head"), "model.heads", config.heads),
            ("activation_function", activation, "that of model.mlp gelu", _ACTIVATION),
            ("layer_norm_epsilon", epsilon, "model.norm_eps", config.norm_eps),
        ]
    )
    found = {}
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix("transformer.")
        if re.fullmatch(r"h\.\d+\.attn\.(masked_)?bias", name):
            continue  # the mask, saved by older versions
        if name == "lm_head.weight" and config.tied_embeddings:
            continue
        matrix = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        for theirs, here in _NAMES:
            name = re.sub(theirs, here, name)
        own = tensor.t().contiguous() if matrix else tensor
        parts = own.chunk(3) if "{qkv}" in name else (own,)
        for letter, part in zip("qkv", parts, strict=False):
            found[name.replace("{qkv}", letter)] = part
    return found


_NAMES = (
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


def _transposed(tensor: Tensor) -> Tensor:
    """Transpose a matrix, so that its rows are inputs; return a bias unchanged."""
    return tensor.t() if tensor.dim() == 2 else tensor
