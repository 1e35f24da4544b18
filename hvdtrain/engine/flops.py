"""Model FLOPs, and model FLOPs utilization, MFU (Chowdhery et al., PaLM, 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain import comm
from hvdtrain.data.loader import Batch, has_own_order, to_device
from hvdtrain.log import logger
from hvdtrain.tasks import Task, first_batch

META = torch.device("meta")


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a run, in matrix products and convolutions.

    Args:
        of_sample: FLOPs of a forward and a backward pass
        peak: peak FLOP/s of each rank's device
    """

    of_sample: float
    peak: float

    def utilization(self, samples: int, seconds: float, ranks: int) -> float:
        """MFU of a step with `samples` samples over all ranks."""
        return self.of_sample * samples / (seconds * self.peak * ranks)


def count(task: Task, model: nn.Module, dataset: Dataset[Any], samples: int) -> float | None:
    """FLOPs of forward and backward over a micro-batch; None, and a line in the log: not known.

    Everything is computed with meta tensors, which have shapes and no values: no device memory is
    used, and the model is not changed. If a task does something that meta tensors do not support
    (read a value, call a collective), the FLOPs are not known.
    """
    if has_own_order(dataset):
        logger.debug("no MFU: samples of an IterableDataset are not read before training")
        return None
    try:
        batch = first_batch(task, dataset, samples)
        # Only this rank does this: collectives are refused.
        for shapes in comm.COLLECTIVES.micro_batches(iter([to_device(batch, META)]), in_common=0):
            return _counted(task, model, shapes)
    except Exception as error:  # a user's model may raise anything on tensors without values
        logger.debug("no MFU: the FLOPs could not be counted (%s: %s)", type(error).__name__, error)
    return None


class _Loss(nn.Module):
    """A task's loss as a module whose tensors can be replaced for a call."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, batch: Batch) -> Tensor:
        found = self._task.loss(self.model, batch)["loss"]
        loss: Tensor = found[0] if isinstance(found, tuple) else found
        return loss


def _counted(task: Task, model: nn.Module, batch: Batch) -> float:
    loss = _Loss(task, model)
    tensors = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for named in (loss.named_parameters(), loss.named_buffers())
        for name, tensor in named
    }
    with FlopCounterMode(display=False) as counter:
        functional_call(loss, tensors, (batch,)).backward()
    return float(counter.get_total_flops())
