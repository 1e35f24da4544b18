"""Two hosts in namespaces, each with one core of this machine, for measurements."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType

from tests.support.cluster import Cluster
from tests.support.job import Finished

NAMES = ("node1", "node2")
ENV = {"OMP_NUM_THREADS": "1"}


class PinnedHosts:
    """The hosts NAMES; requires root, and an otherwise idle machine.

    Attributes:
        shared: a directory that both hosts share.
    """

    def __init__(self) -> None:
        self._cluster = Cluster(NAMES)

    def __enter__(self) -> PinnedHosts:
        self._cluster.__enter__()
        self.shared = self._cluster.shared
        for name in NAMES:  # including processes that its sshd starts
            for process in self._cluster.processes(name):
                os.sched_setaffinity(process.pid, {_core(name)})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cluster.__exit__(kind, error, trace)

    def run(self, host: str, command: Sequence[str], timeout: float) -> Finished:
        """Run a command on the core of this host."""
        return self._cluster.run(host, self.pinned(host, command), env=ENV, timeout=timeout)

    def pinned(self, host: str, command: Sequence[str]) -> list[str]:
        """Return `command`, pinned to the core of this host."""
        return ["taskset", "--cpu-list", str(_core(host)), *command]

    def limit(self, mbit: int | None) -> None:
        """Limit the bandwidth that each host sends with; None: no limit."""
        for name in NAMES:
            self._cluster.run(name, ["tc", "qdisc", "del", "dev", "eth0", "root"])
            if mbit is not None:
                tbf = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms"]
                done = self._cluster.run(name, ["tc", "qdisc", "add", "dev", "eth0", "root", *tbf])
                assert done.returncode == 0, done


def _core(host: str) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[NAMES.index(host) % len(cores)]
