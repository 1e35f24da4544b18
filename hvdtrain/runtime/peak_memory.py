"""The most memory that this process had in use, of the host and of its device."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory of each phase since its making; resets the process's own high-water mark.

    Attributes:
        host: bytes that were resident; None where the kernel does not let it be reset.
        device: bytes that tensors took up on the device; None without a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.host: dict[str, int] | None = {}
        self.device: dict[str, int] | None = {} if device.type == "cuda" else None
        self._on = device
        self._reset()

    def note(self, phase: str) -> None:
        """What was reached since the last call counts for `phase`."""
        if self.host is not None:
            self.host[phase] = max(self.host.get(phase, 0), high_water_mark())
        if self.device is not None:
            peak = torch.cuda.max_memory_allocated(self._on)
            self.device[phase] = max(self.device.get(phase, 0), peak)
        self._reset()

    def _reset(self) -> None:
        try:
            _CLEAR_REFS.write_text("5")  # proc(5): sets VmHWM to what is resident now
        except OSError:
            self.host = None
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self._on)


def high_water_mark() -> int:
    """Bytes that were resident at most, since the process began or this was reset."""
    text = _STATUS.read_text()
    return int(text.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
