"""What the nodes that a batch system lends to a run have added to it."""

from __future__ import annotations

from collections.abc import Mapping


class BorrowedNodes:
    """Counts node-seconds of lent hosts, each from the start of its agent to its last step.

    Attributes:
        hosts: hosts that are lent now -> since when, in unix time.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, float] = {}
        self._lent: dict[tuple[str, float], float] = {}
        self._used = 0.0

    def add_step(self, seconds: float, now: float) -> None:
        """Count a step of this duration in which all of `hosts` took part, at its end."""
        self._used += seconds * len(self.hosts)
        for host, since in self.hosts.items():
            self._lent[host, since] = max(0.0, now - since)

    def seconds(self) -> Mapping[str, float]:
        """Return the node-seconds in steps, "used", and the others, "idle", so far."""
        return {"used": self._used, "idle": max(0.0, sum(self._lent.values()) - self._used)}
