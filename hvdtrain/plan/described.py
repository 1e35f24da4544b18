"""A job without a measurement: from its model's FLOPs and a GPU's peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain import comm
from hvdtrain.config import parse
from hvdtrain.data.loader import Batch, to_device
from hvdtrain.engine.flops import META, count
from hvdtrain.errors import UserError
from hvdtrain.optim.precision import Precision
from hvdtrain.plan.job import (
    BACKWARD_SHARE,
    JobProfile,
    evenly_ready,
    free_wires,
    require_micro_size,
)
from hvdtrain.process.data import build_data
from hvdtrain.tasks import Task, blocks_of, first_batch
from hvdtrain.telemetry.gpu import PEAKS, peak_flops

# --- memory that a forward pass keeps ----------------------------------------


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


def described_job(flags: Sequence[str], gpu: str, mfu: float) -> JobProfile:
    """Describe a job with float32 parameters and AdamW's state; activations count as float32 too.

    Args:
        flags: flags of a run; `precision.name` selects the peak.
        gpu: name that contains the words of a name in telemetry.gpu.PEAKS.
        mfu: fraction of the peak that the model reaches.

    Raises:
        UserError: the GPU is unknown, the FLOPs cannot be counted, or micro-batches have no fixed
            size.
    """
    settings = parse(flags)
    config = settings.config
    require_micro_size(config.batch)
    task, datasets = build_data(settings)
    # Build the model with real values: some models read values (tables of positions) when built.
    model = task.model()
    name = config.precision.name
    dtype = Precision().dtype(model) if name == "float32" else torch.bfloat16
    peak = peak_flops(gpu, dtype, tf32=False)
    if peak is None:
        raise UserError(f"--gpu {gpu}: its peak is unknown; known are {', '.join(PEAKS)}")
    flops = count(task, model, datasets.train, config.batch.micro_samples)
    if flops is None:
        raise UserError("--gpu: the model's FLOPs cannot be counted; use --measure on such a GPU")
    seconds = flops / (peak * mfu)
    model = model.to(META)
    batch = to_device(first_batch(task, datasets.train, config.batch.micro_samples), META)
    for shapes in comm.COLLECTIVES.micro_batches(iter([batch]), in_common=0):
        kept = forward(task, model, shapes)[1]
    parameters = [p for p in model.parameters() if p.requires_grad]
    return JobProfile(
        forward_seconds=seconds * (1 - BACKWARD_SHARE),
        backward_seconds=seconds * BACKWARD_SHARE,
        optimizer_seconds=0.0,
        other_seconds=0.0,
        micro_batches=config.batch.micro_batches,
        micro_size=config.batch.micro_samples,
        buckets=evenly_ready(parameters),
        costs=free_wires(),
        element_bytes=parameters[0].element_size(),
        optimizer_bytes=2.0 * sum(p.numel() * p.element_size() for p in parameters),
        activation_bytes=kept.activation_bytes,
        blocks=kept.blocks,
        block_bytes=kept.block_bytes,
        outside_bytes=kept.outside_bytes,
    )
