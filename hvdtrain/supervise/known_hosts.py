"""Hosts that a supervisor may currently use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from hvdtrain.errors import UserError
from hvdtrain.launch.discovery import Probe, answering
from hvdtrain.launch.hostfile import Host


class KnownHosts:
    """The listed hosts, except hosts that are excluded for a while.

    Args:
        read: reads the list of hosts; called repeatedly.
        probe: probes whether a host responds.

    Raises:
        UserError: as `read`. Later errors of `read` are ignored and the last list is kept, because
            the file may be being edited.
    """

    def __init__(self, read: Callable[[], list[Host]], probe: Probe) -> None:
        self._read = read
        self._probe = probe
        self._last = read()
        self._aside: dict[str, float] = {}

    def listed(self) -> list[Host]:
        """Return the hosts that are not excluded, whether or not they respond."""
        with contextlib.suppress(UserError):
            self._last = self._read()
        now = time.monotonic()
        return [host for host in self._last if self._aside.get(host.name, 0.0) <= now]

    def reachable(self, timeout: float) -> list[Host]:
        """Return the hosts in `listed` that respond within `timeout` seconds."""
        return answering(self.listed(), self._probe, timeout)

    def exclude(self, names: Iterable[str], seconds: float) -> None:
        """Exclude hosts for `seconds`."""
        self._aside |= dict.fromkeys(names, time.monotonic() + seconds)
