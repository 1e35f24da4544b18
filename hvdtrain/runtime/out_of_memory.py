"""Error messages for insufficient memory."""

from __future__ import annotations

import psutil
import torch

_GIB = 2**30
# Cheapest first.
_TRY = (
    "memory.checkpoint_activations blocks (backward computes activations again)",
    "memory.offload_activations true (on GPUs)",
    "a smaller batch.micro_size (the curve stays)",
)
# Ways to share a model between ranks, fewest requirements on the model first.
_SPREAD = (
    "parallel.zero 1 (the optimizer's state)",
    "parallel.shard (parameters too)",
    "parallel.tensor (each matrix, and activations)",
    "parallel.pipeline (some of the blocks each)",
    "parallel.context (long sequences of the GPT)",
)
ADVICE = (
    f"Try, in this order: {'; '.join(_TRY)}; or divide it between more ranks: {', '.join(_SPREAD)}"
)
# Text in the RuntimeError of torch's CPU allocator.
_OF_CPU = "DefaultCPUAllocator"


def explained(error: BaseException) -> str:
    """Explain an allocator's error: what is allocated and what to try; "" for other errors."""
    if isinstance(error, torch.OutOfMemoryError):
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        has = (
            f"the GPU's memory is not enough: {allocated / _GIB:.1f} GiB are allocated and "
            f"{reserved / _GIB:.1f} GiB reserved of {total / _GIB:.1f} GiB"
        )
    elif isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OF_CPU in str(error)
    ):
        own = psutil.Process().memory_info().rss
        has = (
            f"memory is not enough: this process has {own / _GIB:.1f} GiB, and the host has "
            f"{psutil.virtual_memory().available / _GIB:.1f} GiB left"
        )
    else:
        return ""
    first = str(error).partition("\n")[0]
    return f"{has} ({first}). {ADVICE}"
