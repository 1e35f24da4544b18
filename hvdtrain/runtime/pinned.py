"""Pinned host memory of exact size, which GPUs access directly."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU


def pinned(size: int, device: torch.device) -> Tensor:
    """Allocate memory that is pinned as long as a view of it exists.

    torch's own pinned memory is rounded up to a power of two, and is never returned.

    Args:
        size: in bytes.
        device: a GPU that this process uses; in another thread CUDA would use GPU 0 as well.

    Returns:
        A uint8 tensor of `size` elements, at the start of a page.

    Raises:
        RuntimeError: CUDA cannot pin the memory.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages = _Pages(-1, size)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    with torch.cuda.device(device):
        pages.pin(memory.data_ptr(), size)
    return memory


class _Pages(mmap.mmap):
    """Memory that is no longer pinned when it is freed.

    It is shared with forked processes: copy-on-write could replace pages that the GPU writes to.
    """

    _pinned_at = 0  # address
    _process = 0  # forked processes have no CUDA

    def pin(self, address: int, size: int) -> None:
        cuda = torch.cuda.cudart()
        result = cuda.cudaHostRegister(address, size, _PORTABLE)
        if int(result):
            error = cuda.cudaGetErrorString(result)
            raise RuntimeError(f"CUDA cannot pin {size} bytes of host memory: {error}")
        self._pinned_at, self._process = address, os.getpid()

    def __del__(self) -> None:
        if self._pinned_at and self._process == os.getpid():
            torch.cuda.cudart().cudaHostUnregister(self._pinned_at)
