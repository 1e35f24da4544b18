"""Recognition of the checkpoints of other trainers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hvdtrain.checkpoint.interchange.named import read_dcp_run, read_deepspeed, read_megatron_core
from hvdtrain.checkpoint.interchange.other_run import OtherRun
from hvdtrain.checkpoint.interchange.scripts import read_script
from hvdtrain.checkpoint.interchange.transformers_runs import read_accelerate, read_trainer
from hvdtrain.checkpoint.layout import STATE
from hvdtrain.errors import UserError

# Each returns None if a path is not of its format. A further format is one more row.
READERS: tuple[Callable[[Path], OtherRun | None], ...] = (
    read_script,
    read_trainer,
    read_accelerate,
    read_megatron_core,
    read_dcp_run,
    read_deepspeed,
)


def read_other_run(path: Path) -> OtherRun:
    """Read the checkpoint of another trainer, onto the CPU; nothing in it is executed.

    Raises:
        UserError: it is none, or is not complete.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such file or directory")
    if (path / "checkpoints").is_dir() or (path / STATE).exists():
        raise UserError(f"{path} is hvdtrain's own: continue it with --run.resume, or its --run.id")
    for read in READERS:
        run = read(path)
        if run is not None:
            return run
    raise UserError(
        f"{path}: expected a checkpoint with an optimizer: a file of torch.save or of Lightning, "
        "checkpoint-N of the Trainer of transformers, a directory of Accelerate's save_state, of "
        "torchtitan or torch.distributed.checkpoint, a universal checkpoint of DeepSpeed, or "
        "Megatron-LM's torch_dist"
    )
