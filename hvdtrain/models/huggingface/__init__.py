"""Conversion of a GPT to and from Hugging Face transformers, in three layouts.

A GPT with learned positions has GPT-2's layout. With rotary positions it has GPT-NeoX's layout,
with attention and MLP in sequence, or, with RMSNorm and SwiGLU, Llama's.
https://huggingface.co/docs/transformers/model_doc/gpt2, .../gpt_neox and .../llama
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hvdtrain.errors import UserError
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.huggingface import gpt2, gpt_neox, llama

_EXPORTED = {"gpt2": gpt2.exported, "gpt_neox": gpt_neox.exported, "llama": llama.exported}
_READ = {"gpt2": gpt2.read, "llama": llama.read}


def to_huggingface(
    config: GPTConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (config.json, tensors of model.safetensors).

    Args:
        config: `vocab_size` must be set.
        weights: of a GPT, with current names (`GPT.upgrade_checkpoint`).

    Raises:
        UserError: transformers has no such model.
    """
    facts, tensors = _EXPORTED[_layout(config)](config, weights)
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
        config: of the GPT.
        facts: config.json.
        tensors: of model.safetensors; with or without the prefix of the model with a head.

    Raises:
        UserError: the layout is not supported, or the model differs from the GPT.
    """
    layout = facts["model_type"]
    if layout not in _READ:
        raise UserError(
            f"config.json is of {layout!r}; of Hugging Face's layouts, those of "
            f"{' and '.join(_READ)} are read"
        )
    return _READ[layout](config, facts, tensors)


def _layout(config: GPTConfig) -> str:
    """The layout of the transformers model that computes the same."""
    if config.attention != "full":
        raise UserError(
            f"transformers has no model with model.attention {config.attention}: it computes full"
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
