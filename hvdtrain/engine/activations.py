"""Activation checkpointing and offloading of a model's blocks, in place: names stay what they are.

Chen et al., "Training deep nets with sublinear memory cost", arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hvdtrain.engine.config import MemoryConfig
from hvdtrain.errors import UserError
from hvdtrain.tasks.blocks import blocks_of

_ATEN = torch.ops.aten
# Results that `selective` keeps: they take longer to compute again than others.
_KEPT = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


def arrange_activations(
    config: MemoryConfig, task: Any, model: nn.Module, device: torch.device
) -> None:
    """From now on passes through the blocks keep what the keys of `memory` say.

    Gradients have the same bits: what is computed again draws the same random numbers, in the same
    precision.

    Raises:
        UserError: the model has no blocks, or there is no device to offload from.
    """
    if config.checkpoint_activations == "none" and not config.offload_activations:
        return
    if config.offload_activations and device.type != "cuda":
        raise UserError(
            f"memory.offload_activations: this rank computes on {device.type}, whose activations "
            "lie in the host's memory already"
        )
    blocks = blocks_of(task, model)
    if not blocks:
        raise UserError(
            "memory.checkpoint_activations and memory.offload_activations are for blocks, and the "
            "model has no blocks (no nn.ModuleList, and the task no blocks(model) that names them)"
        )
    for number, block in enumerate(blocks):
        again = config.every > 0 and number % config.every == 0
        block.forward = _arranged(config, block.forward, again)


def _arranged(config: MemoryConfig, forward: Callable[..., Any], again: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if config.checkpoint_activations == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def arranged(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with save_on_cpu(pin_memory=True) if config.offload_activations else nullcontext():
            if again:
                return checkpoint(forward, *args, **options, **kwargs)
            return forward(*args, **kwargs)

    return arranged


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
