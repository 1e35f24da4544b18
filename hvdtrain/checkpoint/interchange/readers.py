"""Recognition of the checkpoints of other trainers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hvdtrain.checkpoint.interchange.named import read_dcp_run, read_deepspeed, read_megatron_core
from hvdtrain.checkpoint.interchange.other_run import OtherRun
from hvdtrain.checkpoint.interchange.scripts import read_script
from hvdtrain.checkpoint.interchange.transformers_runs import read_accelerate, read_trainer
from hvdtrain.checkpoint.layout import STATE
from hvdtrain.checkpoint.pickled import UNEXPECTED, first_line
from hvdtrain.errors import UserError


def _readers(values: bool) -> tuple[Callable[[Path], OtherRun | None], ...]:
    """Each returns None if a path is not of its format. A further format is one more row."""
    return (
        read_trainer,
        read_accelerate,
        partial(read_megatron_core, values=values),
        partial(read_dcp_run, values=values),
        read_deepspeed,
        read_script,
    )


def read_other_run(path: Path, values: bool = True) -> OtherRun:
    """Read the checkpoint of another trainer, onto the CPU; nothing in it is executed.

    Args:
        values: of tensors; False: for a description, without which tensors may be on the meta
            device. Files of `torch.save` are mapped, so their values are read when they are used.

    Raises:
        UserError: it is none, or is not complete.
    """
    if not os.path.exists(path):  # also of a name that is too long
        raise UserError(f"{path}: there is no such file or directory")
    # Others have directories of this name, too, but not with such checkpoints in them.
    if any((path / "checkpoints").glob("step_*")) or (path / STATE).exists():
        raise UserError(f"{path} is hvdtrain's own: continue it with --run.resume, or its --run.id")
    try:
        for read in _readers(values):
            run = read(path)
            if run is not None:
                return run
    except UNEXPECTED as error:
        raise UserError(
            f"{path} is not as its trainer writes it: {type(error).__name__}: {first_line(error)}"
        ) from None
    raise UserError(
        f"{path}: expected a checkpoint with an optimizer: a file of torch.save or of Lightning, "
        "checkpoint-N of the Trainer of transformers, a directory of Accelerate's save_state, of "
        "torchtitan or torch.distributed.checkpoint, a universal checkpoint of DeepSpeed, or "
        "Megatron-LM's torch_dist"
    )
