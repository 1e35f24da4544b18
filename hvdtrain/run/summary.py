"""Final log lines of rank 0: metrics, a sample and the run directory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hvdtrain.checkpoint.writer import CheckpointWriter
from hvdtrain.engine.callbacks.evaluate import evaluating
from hvdtrain.engine.loop import Loop
from hvdtrain.log import logger
from hvdtrain.run.build import RunComponents
from hvdtrain.run.callbacks import Callbacks
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime.terminal import terminal
from hvdtrain.tasks import optional

# Time for a launcher to forward this output before output written directly to its terminal.
_FORWARD_SECONDS = 0.3
_FINAL = {
    "final train loss": "loss",
    "final validation loss": "validation_loss",
    "final validation loss of the averaged weights": "ema_validation_loss",
}


def log_summary(
    loop: Loop,
    callbacks: Callbacks,
    writer: CheckpointWriter,
    components: RunComponents,
    folder: RunDirectory,
) -> None:
    """Log the final metrics, show a sample, and log the run directory; on rank 0."""
    if loop.preempted:
        logger.info("asked to stop after step %d; %s", loop.progress.step, writer.newest())
    if writer.failures:
        logger.warning("%d checkpoints could not be written", writer.failures)
    last: dict[str, Any] = callbacks.log.last
    if not last:
        logger.info("step %d of %d was done already", loop.progress.step, loop.train.steps)
    sample = optional(components.task, "sample")
    # Rank 0 alone cannot compute with a model that spans ranks.
    if sample is not None and not loop.preempted and components.mesh is None:
        with components.precision.autocast(components.device):
            _show_sample(sample, components.state.model)
    further = [key for key in last if key.startswith("validation_") and key not in _FINAL.values()]
    names = _FINAL | {f"final {key.replace('_', ' ')}": key for key in further}
    for name, key in names.items():
        if key in last:
            logger.info("%s %.4f", name, last[key])
    if loop.progress.nonfinite:
        logger.warning("%d steps were skipped: gradient not finite", loop.progress.nonfinite)
    logger.info("files of this run: %s", folder.path)


def _show_sample(sample: Callable[[nn.Module], Any], model: nn.Module) -> None:
    """Print a sample of the trained model; no failure here fails the finished run."""
    try:
        with evaluating(model), torch.no_grad():
            text = str(sample(model))
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(f"\n{text.encode(encoding, 'replace').decode(encoding)}\n", flush=True)
        if terminal() not in (None, sys.stderr):
            time.sleep(_FORWARD_SECONDS)
    except Exception as error:
        logger.warning("the sample could not be shown (%s: %s)", type(error).__name__, error)
