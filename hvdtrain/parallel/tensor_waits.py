"""How long this process waits for the collectives that DTensor makes inside of operations."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed._functional_collectives  # noqa: F401 - registers the operation
from torch import DispatchKeySet, Tensor
from torch.library import Library, get_kernel

from hvdtrain import comm

_NAMESPACE, _WAIT = "_c10d_functional", "wait_tensor"


@cache
def measure_waits() -> Library:
    """From now on they count as waits along the axis `tensor`, on CPUs.

    There the operation that makes a result available blocks until the collective is done. On GPUs
    it blocks nothing: the device waits, unseen by the host.
    """
    waits = get_kernel(f"{_NAMESPACE}::{_WAIT}", "CPU")

    def timed(keys: DispatchKeySet, tensor: Tensor) -> Tensor:
        with comm.OWN.waiting("tensor"):
            found: Tensor = waits.call_boxed(keys, tensor)
        return found

    library = Library(_NAMESPACE, "IMPL")
    library.impl(_WAIT, timed, "CPU", with_keyset=True)
    return library
