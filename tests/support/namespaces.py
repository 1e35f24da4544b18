"""Requirements and environment of the hosts of a test cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

NAMESPACES = ["--net", "--uts", "--ipc", "--mount", "--pid"]
TOOLS = ["hostname", "ip", "mount", "nsenter", "setpriv", "setsid", "ssh", "ssh-keygen", "sshd"]
# The environment of a login on a host, without other variables of this process.
ENVIRONMENT = {
    "PATH": f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": os.environ.get("HOME", "/root"),
    "LANG": "C.UTF-8",
    # mpirun's option to allow root: the hosts have no other user.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # The hosts share this machine's cores, so a waiting rank must yield them.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def why_not() -> str | None:
    """Return why hosts cannot be started on this machine; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=ENVIRONMENT["PATH"]) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2, openssh-server, openssh-client)"
    trial = (
        "mount -t tmpfs tmpfs /run && ip link add name br0 type bridge"
        " && ip link add name v0 type veth peer name v1"
    )
    command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", trial]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=30)
    return f"namespaces are refused here: {done.stderr.strip()}" if done.returncode else None


def pid_namespace(pid: int) -> str | None:
    """Return the process namespace, and thereby the host, of a process; None if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def check(command: Sequence[str]) -> None:
    """Run a command that must succeed; otherwise RuntimeError with its output."""
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
