"""A directory that some hosts see through FUSE, as one of a file server that may not answer."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import Cluster, Process
from tests.support.job import Job, poll

_COMMAND = "bindfs"
_OPTIONS = (
    *("-f", "--enable-lock-forwarding", "--multithreaded"),
    *("-o", "entry_timeout=0,negative_timeout=0,attr_timeout=0"),
)


class HangingDisk:
    """A directory at the same path on hosts of a cluster; each host has its own connection to it.

    Args:
        hosts: all of them must stay up while it is used.
        path: mount point; must not exist.

    Attributes:
        path: see above.
        here: this process's path of the hosts' `path`; it always answers.
    """

    def __init__(self, cluster: Cluster, hosts: Sequence[str], path: Path) -> None:
        self.path = path
        self.here = path.with_suffix(".source")
        self.here.mkdir()
        path.mkdir()
        self._servers = [self._mount(cluster, host, path) for host in hosts]

    @staticmethod
    def why_not() -> str | None:
        """Return why there can be none on this machine; None if there can."""
        return None if shutil.which(_COMMAND) else f"not installed: {_COMMAND}"

    def _mount(self, cluster: Cluster, host: str, path: Path) -> tuple[Job, Process]:
        job = cluster.start(host, [_COMMAND, *_OPTIONS, str(self.here), str(path)], cwd=Path("/"))
        looks = ["mountpoint", "-q", str(path)]
        poll(lambda: cluster.run(host, looks).returncode == 0, 20, f"{path} on {host}")
        found = cluster.processes(host, containing=str(self.here))
        return job, next(p for p in found if p.command.startswith(_COMMAND))

    @contextmanager
    def without_response(self) -> Iterator[None]:
        """Block every access on all hosts inside the context; each continues after it."""
        for _, server in self._servers:
            os.kill(server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for job, server in self._servers:
                os.kill(server.pid, signal.SIGCONT)
                job.resume()
