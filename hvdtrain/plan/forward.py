"""Memory that a forward pass keeps, and the output size of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.data.loader import Batch
from hvdtrain.tasks import Task
from hvdtrain.tasks.blocks import blocks_of


@dataclass(frozen=True)
class Kept:
    """Memory of one micro-batch.

    Args:
        activation_bytes: activations saved for the backward pass, parameters not counted.
        blocks: number of blocks of the model.
        block_bytes: output of the first block; 0: there is no block, or its output is not a tensor.
        outside_bytes: trained parameters that are in no block.
    """

    activation_bytes: float
    blocks: int
    block_bytes: float
    outside_bytes: float


def forward(task: Task, model: nn.Module, batch: Batch) -> tuple[Tensor, Kept]:
    """Return the loss of a micro-batch, ready for backward, and the memory that it keeps."""
    held: dict[int, int] = {}
    given: list[int] = []
    # A saved storage exists until the backward pass, so its number is unique. `_cdata` is private,
    # but data_ptr() is 0 for every storage without memory (the meta device). If torch removes it,
    # `hvdtrain plan` fails; tests/single/test_torch_private.py detects it.
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            held[storage._cdata] = storage.nbytes()
        return tensor

    def note(module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            given.append(first.nbytes)

    blocks = blocks_of(task, model)
    hooks = [block.register_forward_hook(note) for block in blocks[:1]]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = task.loss(model, batch)["loss"]
    finally:
        for hook in hooks:
            hook.remove()
    kept = Kept(
        activation_bytes=float(sum(held.values())),
        blocks=len(blocks),
        block_bytes=float(given[0]) if given else 0.0,
        outside_bytes=_outside_bytes(model, blocks),
    )
    return (loss[0] if isinstance(loss, tuple) else loss), kept


def _outside_bytes(model: nn.Module, blocks: Sequence[nn.Module]) -> float:
    inside = {parameter for block in blocks for parameter in block.parameters()}
    trained = (p for p in model.parameters() if p.requires_grad)
    return float(sum(p.nbytes for p in trained if p not in inside))
