"""Check before an exact run on GPUs that a micro-batch has the same gradient each time.

torch raises an error for the operations without a deterministic kernel that it knows
(runtime/device.py). It does not know kernels of other libraries, nor a loss that depends on more
than the parameters, the samples and the random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hvdtrain import comm
from hvdtrain.data.buckets import SampleBuckets
from hvdtrain.data.loader import has_own_order, read_samples, to_device
from hvdtrain.engine.accumulate import SavedBuffers
from hvdtrain.errors import CollectiveError, UserError
from hvdtrain.log import logger
from hvdtrain.optim.precision import Precision
from hvdtrain.runtime.device import random_numbers_kept, seed_all, without_kernel
from hvdtrain.tasks import Datasets, Task, collate_of, optional

# On a CPU, kernels do not add in the order of their threads, and two passes of a large model take
# long.
CHECKED = ("cuda",)


@dataclass(frozen=True)
class FirstMicroBatch:
    """Passes of a micro-batch, as in training.

    Args:
        samples: numbers of its samples.
        seed: seed of the run.
    """

    task: Task
    model: nn.Module
    datasets: Datasets
    precision: Precision
    samples: Sequence[int]
    seed: int

    def differing(self) -> list[str]:
        """Compute the gradient twice; return the parameters at which any bit differs.

        Parameters, buffers, gradients and the states of the random numbers remain unchanged.

        Raises:
            CollectiveError: the task calls collectives, but each rank computes this alone.
        """
        buffers = SavedBuffers(self.model)
        buffers.keep()
        alone = comm.COLLECTIVES.refused("called in a check that each rank computes alone")
        with random_numbers_kept(), alone:
            first = self._gradients(buffers)
            second = self._gradients(buffers)
        return [n for n in first | second if not _identical(first.get(n), second.get(n))]

    def _gradients(self, buffers: SavedBuffers) -> dict[str, Tensor]:
        device = next(self.model.parameters()).device
        seed_all(self.seed)
        samples = read_samples(self.datasets.train, self.samples)
        batch = to_device(collate_of(self.task)(samples), device)
        try:
            with self.precision.autocast(device):
                loss = self.task.loss(self.model, batch)["loss"]
            trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            scalar = loss[0] if isinstance(loss, tuple) else loss
            found = torch.autograd.grad(scalar, [*trained.values()], allow_unused=True)
        finally:
            buffers.restore()
        # The exchanges refuse sparse gradients.
        gradients = zip(trained, found, strict=True)
        return {n: g for n, g in gradients if g is not None and g.layout == torch.strided}


def _identical(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return False
    # As bytes: equal NaNs are identical, and zeros of different signs are not.
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (one, other)))


def first_samples(datasets: Datasets, size: int, buckets: SampleBuckets | None) -> list[int]:
    """Return the numbers of the samples of a micro-batch like those of the run.

    Args:
        size: samples of a micro-batch, without buckets.
    """
    if buckets is not None:
        return buckets.micro_batch(0)
    return [number % len(datasets.train) for number in range(size)]  # type: ignore[arg-type]


def check_repeatable(
    task: Task,
    model: nn.Module,
    datasets: Datasets,
    precision: Precision,
    seed: int,
    size: int,
    buckets: SampleBuckets | None,
) -> None:
    """Check on this rank that a micro-batch has the same gradient each time, if it is on a GPU.

    Not checked: own loops, whose loss only the script knows; iterable datasets, which can only be
    read from start to end; tasks that call collectives.

    Raises:
        UserError: the gradients differ, or an operation has no deterministic kernel.
    """
    device = next(model.parameters()).device
    own_loop = optional(task, "script_state") is not None
    if device.type not in CHECKED or own_loop or has_own_order(datasets.train):
        return
    samples = first_samples(datasets, size, buckets)
    try:
        differing = FirstMicroBatch(task, model, datasets, precision, samples, seed).differing()
    except CollectiveError as error:
        logger.debug("exchange.name exact: gradients are not computed twice (%s)", error)
        return
    except RuntimeError as error:
        raise without_kernel(error) or error from None
    if differing:
        raise UserError(
            "exchange.name exact: the gradient of a micro-batch, computed twice, differs at "
            f"{len(differing)} of {len([*model.parameters()])} parameters, such as "
            f"{differing[0]}: an operation of the model or its loss is not deterministic on this "
            "device, or the loss depends on more than parameters, samples and random numbers. Use "
            "another operation, or exchange.name dense"
        )
