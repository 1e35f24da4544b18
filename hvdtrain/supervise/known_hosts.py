"""The hosts that a supervisor may use now."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from hvdtrain.errors import UserError
from hvdtrain.launch.discovery import Probe, answering
from hvdtrain.launch.hostfile import Host


class KnownHosts:
    """The listed hosts, less those that are set aside for a while.

    Args:
        read: reads which hosts there are; called again and again.
        probe: how a host is asked whether it answers.

    Raises:
        UserError: as `read` does. Later on what it said last counts: a file is being edited.
    """

    def __init__(self, read: Callable[[], list[Host]], probe: Probe) -> None:
        self._read = read
        self._probe = probe
        self._last = read()
        self._aside: dict[str, float] = {}

    def listed(self) -> list[Host]:
        """Those that are not set aside, answering or not."""
        with contextlib.suppress(UserError):
            self._last = self._read()
        now = time.monotonic()
        return [host for host in self._last if self._aside.get(host.name, 0.0) <= now]

    def reachable(self, timeout: float) -> list[Host]:
        """Those of `listed` that answer within `timeout` seconds."""
        return answering(self.listed(), self._probe, timeout)

    def exclude(self, names: Iterable[str], seconds: float) -> None:
        """Leaves hosts out for so long."""
        self._aside |= dict.fromkeys(names, time.monotonic() + seconds)
