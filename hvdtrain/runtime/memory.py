"""Peak memory of this process, on the host and on its device, and what to do if it runs out."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from hvdtrain.runtime.phases import PhaseTimer

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS_BYTES = 1 << 14


class HighWater:
    """High-water marks of this process; resetting them affects all readers of the marks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        # Kept open: the marks are read and reset at each change of the phase.
        self._status, self._clear_refs = _STATUS.open("rb", 0), None
        if _mark_in(self._status.read()) is not None:
            with suppress(OSError):
                self._clear_refs = _CLEAR_REFS.open("wb", 0)
        self.set_back()

    def read(self) -> tuple[int, int | None]:
        """Return the peaks since the last reset, in bytes.

        Returns:
            Resident memory on the host; memory of tensors on the device (None without a GPU).
        """
        host = _resident_peak(os.pread(self._status.fileno(), _STATUS_BYTES, 0))
        if self._device is None:
            return host, None
        return host, torch.cuda.max_memory_allocated(self._device)

    def set_back(self) -> bool:
        """Reset the marks; return whether the kernel allows resetting the host's mark."""
        if self._clear_refs is not None:
            try:
                self._clear_refs.write(b"5")  # proc(5): sets VmHWM to the current resident size
            except OSError:
                self._clear_refs = None
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        return self._clear_refs is not None


@dataclass(eq=False)
class Peaks:
    """Peak memory in bytes.

    Args:
        host: phase -> resident memory; empty if the kernel does not report it.
        device: phase -> memory of tensors on the device; empty without a GPU.
    """

    host: dict[str, int] = field(default_factory=dict)
    device: dict[str, int] = field(default_factory=dict)

    def add(self, phase: str, host: int | None, device: int | None) -> None:
        for most, reached in ((self.host, host), (self.device, device)):
            if reached is not None:
                most[phase] = max(most.get(phase, 0), reached)


class PeakMemory:
    """Peaks of a process by phase; while they are recorded, a phase change takes 0.01 ms.

    Attributes:
        of_run: peaks in the steps that the ranks compare.
    """

    def __init__(self, device: torch.device, timer: PhaseTimer) -> None:
        self._timer = timer
        self._marks = HighWater(device)
        self._phase = timer.phase
        self._before = (0, 0)  # peaks before the last reset of the marks
        self._recorded: tuple[Peaks, ...] = ()
        self.of_run = Peaks()

    def record(self, peaks: Peaks) -> None:
        """Record the peak of each phase in `peaks` until `stop`."""
        if self._recorded:
            self._note()  # earlier peaks do not belong to `peaks`
        else:
            self._phase = self._timer.phase
            self._note()  # only resets the marks
            self._timer.listen(self._enter)
        self._recorded = (*self._recorded, peaks)

    def stop(self, peaks: Peaks) -> None:
        """Stop recording, including the current phase so far; do nothing if it is not recorded."""
        if peaks not in self._recorded:
            return
        self._note()
        self._recorded = tuple(other for other in self._recorded if other is not peaks)
        if not self._recorded:
            self._timer.unlisten(self._enter)

    def most(self) -> tuple[int, int]:
        """Return the peaks of host and device since construction, in bytes; 0 without a GPU."""
        return self._with(*self._marks.read())

    def _enter(self, phase: str) -> None:
        self._note()
        self._phase = phase

    def _note(self) -> None:
        host, device = self._marks.read()
        self._before = self._with(host, device)  # before the reset: another thread may read
        settable = self._marks.set_back()
        for peaks in self._recorded:
            peaks.add(self._phase, host if settable else None, device)

    def _with(self, host: int, device: int | None) -> tuple[int, int]:
        return max(self._before[0], host), max(self._before[1], device or 0)


def resident_peak() -> int:
    """Return the peak resident memory of this process in bytes, since HighWater last reset it."""
    return _resident_peak(_STATUS.read_bytes())


def _resident_peak(status: bytes) -> int:
    mark = _mark_in(status)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if mark is None else mark


def _mark_in(status: bytes) -> int | None:
    """Return the mark that can be reset; None: this kernel has none, like gVisor's."""
    found = status.partition(b"VmHWM:")[2].split(maxsplit=1)
    return int(found[0]) * 1024 if found else None


# --- running out of memory ----------------------------------------------------


_GIB = 2**30
# Cheapest first.
_TRY = (
    "memory.checkpoint_activations blocks (backward computes activations again)",
    "memory.offload_activations true (on GPUs)",
    "a smaller batch.micro_size (the same loss curve)",
)
# Ways to share a model between ranks, fewest requirements on the model first.
_SPREAD = (
    "parallel.shard.stage 1 (the optimizer's state)",
    "parallel.shard.degree (parameters too)",
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
