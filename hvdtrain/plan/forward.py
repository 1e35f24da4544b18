"""What a forward pass keeps, and what its blocks hand on."""

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
    """Of one micro-batch.

    Args:
        activation_bytes: that wait for the backward pass, parameters not counted.
        blocks: of the model.
        block_bytes: of what the first one gives to the next; 0: it has none, or gives no tensor.
        outside_bytes: of trained parameters that lie in none of them.
    """

    activation_bytes: float
    blocks: int
    block_bytes: float
    outside_bytes: float


def forward(task: Task, model: nn.Module, batch: Batch) -> tuple[Tensor, Kept]:
    """The loss of a micro-batch, which can be called backward, and what it keeps for that."""
    held: dict[int, int] = {}
    given: list[int] = []
    # A storage that is kept is there until the backward pass, so no other has its number. That is
    # private, but data_ptr() is 0 for every storage without memory (the meta device). If torch
    # drops it, `hvdtrain plan` fails; tests/single/test_torch_private.py notices.
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
