"""The most memory that this process had in use, of the host and of its device."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from hvdtrain.runtime.phases import PhaseTimer

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class HighWater:
    """The high-water marks of this process, which are set back: who else reads them sees less."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._settable = True
        self.set_back()

    def read(self) -> tuple[int, int | None]:
        """Bytes of the host that were resident at most, bytes that tensors took up on the device
        (None without a GPU); since they were set back.
        """
        if self._device is None:
            return _high_water_mark(), None
        return _high_water_mark(), torch.cuda.max_memory_allocated(self._device)

    def set_back(self) -> bool:
        """Whether the kernel lets the mark of the host be set back."""
        if self._settable:
            try:
                _CLEAR_REFS.write_text("5")  # proc(5): sets VmHWM to what is resident now
            except OSError:
                self._settable = False
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        return self._settable


@dataclass(eq=False)
class Peaks:
    """Bytes that were in use at most.

    Args:
        host: phase -> resident; empty where the kernel does not tell.
        device: phase -> taken up by tensors on the device; empty without a GPU.
    """

    host: dict[str, int] = field(default_factory=dict)
    device: dict[str, int] = field(default_factory=dict)

    def add(self, phase: str, host: int | None, device: int | None) -> None:
        for most, reached in ((self.host, host), (self.device, device)):
            if reached is not None:
                most[phase] = max(most.get(phase, 0), reached)


class PeakMemory:
    """Peaks of a process by phase, while they are recorded: a phase's change takes 0.1 ms then.

    Attributes:
        of_run: of the steps that the ranks compare.
    """

    def __init__(self, device: torch.device, timer: PhaseTimer) -> None:
        self._timer = timer
        self._marks = HighWater(device)
        self._phase = timer.phase
        self._before = (0, 0)  # the most before the marks were last set back
        self._recorded: tuple[Peaks, ...] = ()
        self.of_run = Peaks()

    def record(self, peaks: Peaks) -> None:
        """From now on `peaks` learns what each phase reaches, until `stop`."""
        if self._recorded:
            self._note()  # what was before is not its
        else:
            self._phase = self._timer.phase
            self._note()  # for nobody
            self._timer.listen(self._enter)
        self._recorded = (*self._recorded, peaks)

    def stop(self, peaks: Peaks) -> None:
        """What the phase has reached by now counts; nothing happens if it is not recorded."""
        if peaks not in self._recorded:
            return
        self._note()
        self._recorded = tuple(other for other in self._recorded if other is not peaks)
        if not self._recorded:
            self._timer.unlisten(self._enter)

    def most(self) -> tuple[int, int]:
        """Bytes of the host and of the device at most, since this was made; 0 without a GPU."""
        return self._with(*self._marks.read())

    def _enter(self, phase: str) -> None:
        self._note()
        self._phase = phase

    def _note(self) -> None:
        host, device = self._marks.read()
        self._before = self._with(host, device)  # before they are set back: a thread may look
        settable = self._marks.set_back()
        for peaks in self._recorded:
            peaks.add(self._phase, host if settable else None, device)

    def _with(self, host: int, device: int | None) -> tuple[int, int]:
        return max(self._before[0], host), max(self._before[1], device or 0)


def _high_water_mark() -> int:
    text = _STATUS.read_text()
    return int(text.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
