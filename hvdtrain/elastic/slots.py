"""Growing pause before a slot is used again after its process has died or was refused."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.elastic.process import Process

_PAUSES = (1.0, 60.0)  # seconds after a first failure; longest pause
_START_PAUSE = 10.0  # longest pause if a process ended before it requested its ranks
_WELL_SECONDS = 60.0  # a process that trained this long proves its slot good
# Each failed state transfer costs the training ranks seconds.
_REFUSED_PAUSES = (60.0, 3600.0)


@dataclass
class _Slot:
    failures: int = 0
    refusals: int = 0
    not_before: float = 0.0


class Slots:
    """The slots of all hosts.

    Args:
        pauses: (first, longest) pause after failures in seconds; default: 1 and 60.
    """

    def __init__(self, pauses: Sequence[float] | None) -> None:
        self._first, self._most = pauses or _PAUSES
        self._slots: dict[tuple[str, int], _Slot] = {}

    def usable(self, host: str, number: int) -> bool:
        slot = self._slots.get((host, number))
        return slot is None or time.monotonic() >= slot.not_before

    def failed(self, process: Process) -> float:
        """Record that a slot's process has died; return the pause in seconds.

        Args:
            process: still in the state in which it died.
        """
        slot = self._slots.setdefault((process.host, process.slot), _Slot())
        well = process.state == "running" and process.lasted() > _WELL_SECONDS
        slot.failures = 1 if well else slot.failures + 1
        most = min(_START_PAUSE, self._most) if process.state == "starting" else self._most
        pause = min(most, self._first * 2 ** min(slot.failures - 1, 10))
        slot.not_before = time.monotonic() + pause
        return pause

    def refused(self, process: Process, for_good: bool) -> float:
        """Record that a slot's process was refused; return the pause in seconds.

        Args:
            for_good: the slot is not used until `forgive`.
        """
        slot = self._slots.setdefault((process.host, process.slot), _Slot())
        first, most = _REFUSED_PAUSES
        pause = math.inf if for_good else min(most, first * 2 ** min(slot.refusals, 10))
        slot.refusals += 1
        slot.not_before = time.monotonic() + pause
        return pause

    def forgive(self) -> None:
        """Release slots of refused processes: after a change of hosts a new process may fit."""
        self._slots = {place: slot for place, slot in self._slots.items() if not slot.refusals}
