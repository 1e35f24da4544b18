"""A job without a measurement: from its model's FLOPs and a GPU's peak."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain import comm
from hvdtrain.config import parse
from hvdtrain.data.loader import to_device
from hvdtrain.engine.flops import META, count
from hvdtrain.errors import UserError
from hvdtrain.optim.precision import Precision
from hvdtrain.plan.assumed import BACKWARD_SHARE, free_wires
from hvdtrain.plan.forward import forward
from hvdtrain.plan.job import Job, evenly_ready, require_micro_size
from hvdtrain.run.data import build_data
from hvdtrain.tasks.batch import first_batch
from hvdtrain.telemetry.peaks import PEAKS, peak_flops


def described_job(flags: Sequence[str], gpu: str, mfu: float) -> Job:
    """Describe a job with float32 parameters and AdamW's state; activations count as float32 too.

    Args:
        flags: flags of a run; `precision.name` selects the peak.
        gpu: part of a name in telemetry.peaks.PEAKS.
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
    half = name in ("bf16", "fp16", "bf16-params")
    dtype = torch.bfloat16 if half else Precision("float32").dtype(model)
    peak = peak_flops(gpu, dtype, tf32=False)
    if peak is None:
        raise UserError(f"--gpu {gpu}: no peak is known; known are {', '.join(PEAKS)}")
    flops = count(task, model, datasets.train, config.batch.micro_size)
    if flops is None:
        raise UserError("--gpu: the model's FLOPs cannot be counted; --measure on such a GPU")
    seconds = flops / (peak * mfu)
    model = model.to(META)
    batch = to_device(first_batch(task, datasets.train, config.batch.micro_size), META)
    for shapes in comm.OWN.micro_batches(iter([batch]), in_common=0):
        kept = forward(task, model, shapes)[1]
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Job(
        forward_seconds=seconds * (1 - BACKWARD_SHARE),
        backward_seconds=seconds * BACKWARD_SHARE,
        optimizer_seconds=0.0,
        other_seconds=0.0,
        micro_batches=config.batch.micro_batches,
        micro_size=config.batch.micro_size,
        buckets=evenly_ready(parameters),
        costs=free_wires(),
        element_bytes=parameters[0].element_size(),
        optimizer_bytes=2.0 * sum(p.numel() * p.element_size() for p in parameters),
        activation_bytes=kept.activation_bytes,
        blocks=kept.blocks,
        block_bytes=kept.block_bytes,
        outside_bytes=kept.outside_bytes,
    )
