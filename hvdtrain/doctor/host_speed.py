"""On a host: its compute and memory speed, with no other host involved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hvdtrain.runtime import machine

_SECONDS = 0.5
_SIDE, _GPU_SIDE = 512, 4096
_COPY_BYTES, _GPU_COPY_BYTES = 32 << 20, 256 << 20


def load() -> bool:
    """Import torch, which takes seconds, so that all hosts then run `measure` at the same time."""
    import torch

    return bool(torch.cuda.is_available())


def measure() -> dict[str, float]:
    """Measure about a second of work on all cores and on each GPU; mean speeds, not the best.

    Returns:
        "processor": FLOP/s of float32 matrix products; "memory": bytes per second of a copy (each
        byte is read once and written once); for each GPU "gpu N" (bfloat16) and "gpu N memory".
    """
    import torch

    torch.set_num_threads(machine.cores())
    found = {
        "processor": _products(torch.device("cpu"), _SIDE, torch.float32),
        "memory": _copies(torch.device("cpu"), _COPY_BYTES),
    }
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", number)
        found[f"gpu {number}"] = _products(device, _GPU_SIDE, torch.bfloat16)
        found[f"gpu {number} memory"] = _copies(device, _GPU_COPY_BYTES)
    return found


def _products(device: Any, side: int, dtype: Any) -> float:
    import torch

    a = torch.randn(side, side, device=device).to(dtype)
    b, out = a.clone(), torch.empty_like(a)
    return 2 * side**3 * _rate(lambda: torch.mm(a, b, out=out), device)


def _copies(device: Any, size: int) -> float:
    import torch

    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size * _rate(lambda: target.copy_(source), device)


def _rate(work: Callable[[], object], device: Any) -> float:
    """Calls of `work` per second."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        work()
    wait()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        for _ in range(4):
            work()
        wait()
        done += 4
    return done / (time.perf_counter() - began)
