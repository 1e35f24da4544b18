"""The files of a cluster: keys, sshd and ssh configuration, names, output, run directories."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

# Not /tmp: every host has one of its own, and this folder is seen by all of them.
PARENT = Path("/var/tmp")
PREFIX = "hvdtrain-cluster-"

SSHD_CONFIG = """\
HostKey {folder}/{name}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
# A launcher opens one session a rank at once; the default drops some beyond ten.
MaxStartups 200
MaxSessions 200
SetEnv PATH={path}
"""
SSH_CONFIG = """\
Host {names}
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    BatchMode yes
    ConnectTimeout 10
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


class ClusterFolder:
    """A new folder with everything that `host.sh` needs.

    A lock that the kernel drops with its owner tells a living cluster's folder from
    one left behind; making a folder first removes the latter.

    Attributes:
        path: the folder; each host has a folder in it under its name.
        shared: a folder in it for the files of tests.
    """

    def __init__(self, hosts: Mapping[str, str], environment: Mapping[str, str]) -> None:
        """`hosts`: name -> IPv4 address. `environment`: its PATH is that of ssh sessions."""
        with _folders_lock():
            remove_leftovers()
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
            self._lock = _try_lock(self.path)
        self.shared = self.path / "shared"
        self.shared.mkdir()
        self.write_names(hosts)
        ssh_config = SSH_CONFIG.format(names=" ".join(hosts), folder=self.path)
        (self.path / "ssh_config").write_text(ssh_config)
        # Without PAM sshd refuses an account whose password is locked, as root's often is.
        (self.path / "shadow").write_text("root:*:19000:0:99999:7:::\n")
        (self.path / "empty").touch()
        _make_key(self.path / "key", environment)
        for name in hosts:
            own = self.path / name
            own.mkdir()
            _make_key(own / "host_key", environment)
            config = SSHD_CONFIG.format(folder=self.path, name=name, path=environment["PATH"])
            (own / "sshd_config").write_text(config)

    def write_names(self, hosts: Mapping[str, str]) -> None:
        """The names that hosts can look up: name -> IPv4 address."""
        names = "".join(f"{address} {name}\n" for name, address in hosts.items())
        text = f"127.0.0.1 localhost\n{names}".encode()
        # In place, as hosts have mounted this very file; in one write, as they read it meanwhile.
        descriptor = os.open(self.path / "hosts", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            os.pwrite(descriptor, text.ljust(size, b"\n"), 0)
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Removes it; may be called twice."""
        if self._lock is not None:
            shutil.rmtree(self.path)
            os.close(self._lock)
            self._lock = None


def remove_leftovers() -> None:
    """Removes the folders of clusters whose process was killed; its hosts died with it."""
    for folder in PARENT.glob(f"{PREFIX}*"):
        lock = _try_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


@contextlib.contextmanager
def _folders_lock() -> Iterator[None]:
    """Keeps another cluster's start from taking a folder made here for a leftover."""
    descriptor = os.open(PARENT, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where a living process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _make_key(file: Path, environment: Mapping[str, str]) -> None:
    command = [
        "ssh-keygen",
        "-q",
        "-t",
        "ed25519",
        "-N",
        "",
        "-C",
        "hvdtrain-test",
        "-f",
        str(file),
    ]
    subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL, timeout=20)
