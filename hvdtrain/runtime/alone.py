"""The part of horovod.torch that one process uses, for a process without Horovod.

With one rank every sum is its only operand. Functions that only several ranks call are missing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

Average, Sum, Adasum, Min, Max = range(5)


class HorovodInternalError(RuntimeError):
    """A lost rank, which a process alone never has."""


class ProcessSet:
    """The only set: this process."""

    def size(self) -> int:
        return 1


global_process_set = ProcessSet()
_initialized = False


def init() -> None:
    global _initialized
    _initialized = True


def shutdown() -> None:
    global _initialized
    _initialized = False


def abort() -> None:
    pass


def is_initialized() -> bool:
    return _initialized


def rank() -> int:
    return 0


def size() -> int:
    return 1


local_rank, local_size = rank, size


def mpi_enabled() -> bool:
    return False


mpi_built = gloo_built = nccl_built = mpi_enabled


def cuda_built() -> bool:
    return True  # a GPU can be used: nothing is sent from it


def allreduce_async_(tensor: Tensor, **options: Any) -> Tensor:
    return tensor


def grouped_allreduce_async_(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    return tensors


def synchronize(handle: Any) -> Any:
    return handle


class DistributedOptimizer:
    """Does nothing: with one rank, gradients are complete after the last backward pass."""

    def __init__(self, optimizer: object, **options: Any) -> None:
        pass

    def set_backward_passes_per_step(self, passes: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def abandon_step(self) -> None:
        pass
