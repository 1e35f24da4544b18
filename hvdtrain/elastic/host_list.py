"""Hosts of an elastic job, as repeated discovery finds them."""

from __future__ import annotations

import subprocess
from typing import Any

# A host is removed after it is missing from this many discoveries in a row.
_MISSING_DISCOVERIES = 2
_SCRIPT_SECONDS = 30.0


class HostList:
    """Host -> slots, in the order of first discovery.

    Args:
        discovery: Horovod's object: find_available_hosts_and_slots() -> {host: slots}.
    """

    def __init__(self, discovery: Any) -> None:
        self._discovery = discovery
        self._missing: dict[str, int] = {}  # host -> discoveries in a row without it
        self._retired: set[str] = set()
        self.slots: dict[str, int] = {}

    @property
    def host_assignment_order(self) -> list[str]:
        """The hosts; horovodrun reads this attribute."""
        return list(self.slots)

    def count(self) -> int:
        """Number of slots on all hosts."""
        return sum(self.slots.values())

    def find(self) -> dict[str, int]:
        """Run the discovery without changing the list.

        A script is run directly: Horovod would start a new Python for each call.

        Raises:
            Exception: the discovery failed; for example its script failed or timed out.
        """
        script = getattr(self._discovery, "_discovery_script", None)
        if script is None:
            return dict(self._discovery.find_available_hosts_and_slots())
        done = subprocess.run(
            script, shell=True, capture_output=True, text=True, timeout=_SCRIPT_SECONDS
        )
        if done.returncode:
            raise RuntimeError(f"{script}: exit code {done.returncode}: {done.stderr.strip()}")
        hosts = {}
        for line in filter(None, map(str.strip, done.stdout.splitlines())):
            host, _, slots = line.partition(":")
            hosts[host] = int(slots or self._discovery._default_slots)
        return hosts

    def retire(self, host: str) -> None:
        """Remove a host until a discovery misses it: after that the name means another host."""
        self.slots.pop(host, None)
        self._retired.add(host)

    def take_over(self, found: dict[str, int]) -> list[str]:
        """Adopt the result of a discovery; return messages about changes."""
        self._retired &= found.keys()
        found = {host: slots for host, slots in found.items() if host not in self._retired}
        changes = []
        for host in [h for h in self.slots if h not in found]:
            self._missing[host] = self._missing.get(host, 0) + 1
            if self._missing[host] >= _MISSING_DISCOVERIES:
                del self.slots[host]
                changes.append(f"{host} is not there any more")
        for host, slots in found.items():
            self._missing.pop(host, None)
            if self.slots.get(host) != slots:
                changes.append(f"{host} has {slots} slots")
            self.slots[host] = slots
        return changes
