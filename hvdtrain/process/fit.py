"""Search for the largest micro-batch that fits into memory: `batch.micro_size auto`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from torch import nn

from hvdtrain import comm
from hvdtrain.config import Config
from hvdtrain.data.loader import has_own_order, to_device
from hvdtrain.engine.accumulate import SavedBuffers
from hvdtrain.errors import CollectiveError, UserError
from hvdtrain.optim.precision import Precision
from hvdtrain.runtime import machine
from hvdtrain.runtime.collectives import gather_json, on_all_ranks
from hvdtrain.runtime.device import seed_all
from hvdtrain.runtime.memory import ADVICE, HighWater, explained
from hvdtrain.runtime.mesh import Topology
from hvdtrain.tasks import Datasets, Task, first_batch

# Usable share of free memory: allocators leave gaps, and a host runs other programs.
_SHARE = 0.85
# Memory allocated in the first step, in values per parameter: two moments of an optimizer such as
# AdamW, and the buckets in which gradients are sent.
_LATER = 3
# A line through small sizes does not predict sizes larger than this many times the best one.
_FARTHEST = 4


@dataclass(frozen=True)
class Trial:
    """Forward and backward pass of a micro-batch, as in training.

    Args:
        seed: seed of the run; training draws its random numbers again.
    """

    task: Task
    model: nn.Module
    datasets: Datasets
    precision: Precision
    seed: int

    def run(self, samples: int) -> None:
        """Run the passes; then remove the gradients and restore the buffers.

        Raises:
            UserError: the forward pass calls collectives.
        """
        device = next(self.model.parameters()).device
        buffers = SavedBuffers(self.model)
        buffers.keep()
        seed_all(self.seed)
        batch = to_device(first_batch(self.task, self.datasets.train, samples), device)
        try:
            for own in comm.COLLECTIVES.micro_batches(iter([batch]), in_common=0):
                with self.precision.autocast(device):
                    loss = self.task.loss(self.model, own)["loss"]
                (loss[0] if isinstance(loss, tuple) else loss).backward()
        except CollectiveError:
            raise UserError(
                "batch.micro_size auto tries micro-batches on each rank alone, but this model's "
                "forward pass calls collectives (as image.sync_batchnorm does): set a number"
            ) from None
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None
            buffers.restore()


def with_micro_size(config: Config, trial: Trial, topology: Topology) -> Config:
    """Return the configuration; with `batch.micro_size auto`, with the largest size that fits.

    The size divides the global batch and leaves every rank a micro-batch. All ranks agree on it.

    Raises:
        AgreedError: not even one sample fits, or sizes cannot be tried.
    """
    if config.batch.micro_size != "auto":
        return config
    batch, ranks = config.batch, topology.world_size
    most = max(1, batch.global_size // ranks)
    sizes = [n for n in range(1, most + 1) if batch.global_size % n == 0]
    neighbors = len(topology.ranks_by_host()[topology.host])
    need = on_all_ranks("batch.micro_size", lambda: _Need(trial, neighbors))

    def share(samples: int) -> float:
        own = on_all_ranks("batch.micro_size", lambda: need.share(samples))
        shares: list[float] = gather_json(own, "micro_size.share")
        return max(shares)

    at_least: float = max(gather_json(need.at_least, "micro_size.share"))
    largest = largest_that_fits(sizes, at_least, share)
    size = on_all_ranks("batch.micro_size", lambda: _some(largest))
    return replace(config, batch=replace(batch, micro_size=size))


def largest_that_fits(
    sizes: Sequence[int], at_least: float, share: Callable[[int], float]
) -> int | None:
    """Return the largest size whose share of the available memory is at most 1; None: no size fits.

    Memory grows about linearly with the size, so few sizes are tried.

    Args:
        sizes: ascending.
        at_least: the share of size 0.
        share: runs a trial of a size and returns its share; infinite if the trial ran out of
            memory.
    """
    left, best = list(sizes), 0
    before, slope, size = (0, at_least), 0.0, left[0]
    while True:
        found = share(size)
        if found < math.inf:
            slope = max(0.0, (found - before[1]) / (size - before[0]))
        if found <= 1:
            before, best = (size, found), size
        else:
            left = [n for n in left if n < size]
        larger = [
            n
            for n in left
            if best < n <= _FARTHEST * max(best, 1) and before[1] + slope * (n - before[0]) <= 1
        ]
        if not larger:
            return best or None
        size = larger[-1]


class _Need:
    """Memory that passes need, as a share of the memory available to this rank.

    Args:
        neighbors: number of ranks on this host, which share its memory.

    Attributes:
        at_least: the share of gradients and optimizer state.

    Raises:
        UserError: the training data is an IterableDataset, which cannot be read in advance.
    """

    def __init__(self, trial: Trial, neighbors: int) -> None:
        if has_own_order(trial.datasets.train):
            raise UserError(
                "batch.micro_size auto reads samples before training, but an IterableDataset can "
                "only be read from start to end: set a number"
            )
        self._trial = trial
        parameters = [p for p in trial.model.parameters() if p.requires_grad]
        self._device = parameters[0].device
        self._later = _LATER * sum(p.nbytes for p in parameters)
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
            free = torch.cuda.mem_get_info(self._device)[0]
            free += torch.cuda.memory_reserved(self._device) - self._before
        else:
            self._before = psutil.Process().memory_info().rss
            free = machine.free_memory() // neighbors
        self._room = _SHARE * max(free, 1)
        self.at_least = (self._later + sum(p.nbytes for p in parameters)) / self._room

    def share(self, samples: int) -> float:
        """Return the share of a micro-batch; infinite if an allocator runs out of memory.

        Raises:
            UserError: this kernel does not report peak memory, or the model calls collectives.
        """
        marks = HighWater(self._device)
        try:
            self._trial.run(samples)
        except (MemoryError, RuntimeError) as error:
            if not explained(error):
                raise
            return math.inf
        finally:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        host, device = marks.read()
        if device is None and not marks.set_back():
            raise UserError(
                "batch.micro_size auto: this kernel does not report peak memory "
                "(/proc/self/clear_refs): set a number"
            )
        return ((host if device is None else device) - self._before + self._later) / self._room


def _some(size: int | None) -> int:
    if size is None:
        raise UserError(f"batch.micro_size auto: not even one sample fits into memory. {ADVICE}")
    return size
