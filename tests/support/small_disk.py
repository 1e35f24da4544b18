"""A separate disk for some hosts, which can be blocked, full or read-only: ext4 in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.cluster import Cluster
from tests.support.namespaces import check

# The disk is unfrozen however the test ends, because blocked processes cannot be killed.
_FREEZE = """\
import fcntl, os, sys, time
disk = os.open(sys.argv[1], os.O_RDONLY)
fcntl.ioctl(disk, 0xC0045877, 0)  # FIFREEZE
time.sleep(float(sys.argv[2]))
fcntl.ioctl(disk, 0xC0045878, 0)  # FITHAW
"""
_MIB = 1 << 20
# The cgroup v1 root, whose limits apply to all processes that are in no other group.
_READ_LIMIT = Path("/sys/fs/cgroup/blkio/blkio.throttle.read_bps_device")


class SmallDisk:
    """A file system on a loop device, mounted at the same path on hosts of a cluster.

    The kernel releases the device with the last host that has mounted it.

    Args:
        hosts: the first must stay up as long as the disk is used.
        path: mount point; an empty directory that all hosts see.

    Attributes:
        here: this process's path of the hosts' `path`.
    """

    def __init__(self, cluster: Cluster, hosts: list[str], path: Path, mib: int = 64) -> None:
        self._cluster = cluster
        self._path = path
        self._hosts = hosts
        image = path.with_suffix(".image")
        with open(image, "wb") as file:
            file.truncate(mib * _MIB)
        check(["mkfs.ext4", "-q", "-m", "0", str(image)])
        path.mkdir()
        self._on(hosts[0], "mount", "-o", "loop,noatime", str(image), str(path))
        self._device = self._on(hosts[0], "findmnt", "-no", "SOURCE", str(path)).strip()
        self.here = cluster.file(hosts[0], str(path))
        for host in hosts[1:]:
            self.mount(host)

    def mount(self, host: str) -> None:
        """Mount it, also after a host was rebooted."""
        self._on(host, "mount", "-o", "noatime", self._device, str(self._path))

    def block(self, seconds: float) -> None:
        """Block all writers, which cannot be killed meanwhile; return after `seconds`."""
        command = [sys.executable, "-c", _FREEZE, str(self.here), str(seconds)]
        freezer = subprocess.Popen(command, start_new_session=True)
        assert freezer.wait(seconds + 30) == 0, "the disk could not be frozen and thawed"

    @contextmanager
    def full(self) -> Iterator[None]:
        """Fill the disk inside the context."""
        ballast = self.here / "ballast"
        try:
            with suppress(OSError), open(ballast, "wb", buffering=0) as file:
                for size in (_MIB, 512):
                    with suppress(OSError):
                        while True:
                            file.write(bytes(size))
            yield
        finally:
            os.remove(ballast)

    @contextmanager
    def gone(self) -> Iterator[None]:
        """Take the disk away inside the context; an empty directory is there instead."""
        hosts = self._hosts_that_are_up()
        for host in hosts:
            self._unmount(host)
        try:
            yield
        finally:
            for host in hosts:
                self.mount(host)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Make it read-only on all hosts inside the context; open files can still be written."""
        hosts, path = self._hosts_that_are_up(), str(self._path)
        for host in hosts:
            self._on(host, "mount", "--bind", path, path)
            self._on(host, "mount", "-o", "remount,bind,ro", path)
        try:
            yield
        finally:
            for host in hosts:
                self._unmount(host)

    @staticmethod
    def can_be_slow() -> bool:
        """Whether this machine can limit the read speed of a disk."""
        return os.access(_READ_LIMIT, os.W_OK)

    @contextmanager
    def slow(self, bytes_per_second: int) -> Iterator[None]:
        """Slow down reads inside the context; cached checkpoints are dropped first."""
        for path in self.here.rglob("*.safetensors"):
            with suppress(OSError), open(path, "rb") as file:  # the run may have deleted it
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        number = os.stat(self.here).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        _READ_LIMIT.write_text(f"{device} {bytes_per_second}")
        try:
            yield
        finally:
            _READ_LIMIT.write_text(f"{device} 0")

    def _hosts_that_are_up(self) -> list[str]:
        return [host for host in self._hosts if self._cluster.is_up(host)]

    def _unmount(self, host: str) -> None:
        self._on(host, "umount", "--lazy", str(self._path))

    def _on(self, host: str, *command: str) -> str:
        done = self._cluster.run(host, command, cwd=Path("/"))
        assert done.returncode == 0, done
        return done.stdout
