"""Part of the doctor's examination: `python -m tests.support.doctored STAGES HOSTS ROOT [FLAGS]`

STAGES are names of examine.STAGES separated by commas, or "none" to query only the hosts' facts.
The output is the same as for `hvdtrain doctor --format json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.doctor.examine import STAGES, Request, examine
from hvdtrain.doctor.findings import examination_json
from hvdtrain.launch.hostfile import parse_hosts
from tests.support.cluster import REPOSITORY, Cluster

Findings = list[dict[str, Any]]


class Examined:
    """The doctor on node1 of a cluster.

    Args:
        root: run.root, a directory that all hosts see.
    """

    def __init__(self, cluster: Cluster, root: Path) -> None:
        self.cluster, self.root = cluster, root

    def findings(
        self,
        *stages: str,
        hosts: str = "node1:1,node2:1",
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        cwd: Path = REPOSITORY,
        prefix: Sequence[str] = (),
    ) -> Findings:
        """Return the findings of these stages.

        Args:
            prefix: a command that starts the doctor in another way.
        """
        module = [*prefix, "python", "-m", "tests.support.doctored", ",".join(stages) or "none"]
        variables = {"PYTHONPATH": str(REPOSITORY), **(env or {})}
        argv = [*module, hosts, str(self.root), *flags]
        done = self.cluster.run("node1", argv, variables, cwd, timeout=100)
        assert done.returncode == 0, done
        return list(json.loads(done.stdout)["findings"])

    def on(self, host: str, *commands: str) -> None:
        """Run shell commands on a host; they must succeed."""
        for command in commands:
            done = self.cluster.run(host, ["bash", "-c", command], cwd=Path("/"))
            assert done.returncode == 0, done


def named(findings: Findings, check: str, where: str) -> dict[str, Any]:
    """Return the only finding of a check at a place."""
    found = [one for one in findings if (one["check"], one["where"]) == (check, where)]
    assert len(found) == 1, findings
    return found[0]


def main() -> None:
    stages, hosts, root, *flags = sys.argv[1:]
    chosen = [] if stages == "none" else stages.split(",")
    assert set(chosen) <= set(STAGES), chosen
    found = examine(Request(parse_hosts(hosts), 0, root, flags or None, chosen))
    print(examination_json(found))


if __name__ == "__main__":
    main()


BOTH = "node1:1,node2:1"
NAMES = "grep -vw {name} /etc/hosts > /tmp/names; mount --bind /tmp/names /etc/hosts"
BASHRC = "printf '%s\\n' '{line}' > /tmp/bashrc; mount --bind /tmp/bashrc ~/.bashrc"


@dataclass(frozen=True)
class Fault:
    """A fault of node2 as a host.

    Args:
        check: check that must report it.
        make: commands that create it; {root} is run.root.
        says: text of the finding.
        undo: commands that restore the host.
        fixable: the command that the finding names repairs the host; `undo` follows.
        on: host on which the commands run.
        where: location of the finding.
        severity: severity of the finding.
    """

    check: str
    make: str
    says: str
    undo: str
    fixable: bool = False
    on: str = "node2"
    where: str = "node2"
    severity: str = "error"
    hosts: str = BOTH


# Faults in a host's facts.
OF_A_HOST = {
    "own name": Fault(
        "own name", NAMES.format(name="node2"), "cannot resolve its own name",
        "umount -l /etc/hosts", fixable=True,
    ),
    "the name of another": Fault(
        "name", NAMES.format(name="node1"), "node1 cannot be resolved there",
        "umount -l /etc/hosts", where="node1 on node2",
    ),
    "small /dev/shm": Fault(
        "shm", "mount -o remount,size=16m /dev/shm", "/dev/shm has 16 MiB free",
        "mount -o remount,size=1g /dev/shm", fixable=True,
    ),
    "few open files": Fault(
        "open files", "prlimit --pid 1 --nofile=200:", "may open 200 files",
        "prlimit --pid 1 --nofile=4096:",
    ),
    "full disk": Fault(
        "disk", "mount -t tmpfs -o size=64k tmpfs {root}", "No space left on device",
        "umount -l {root}",
    ),
    "nearly full disk": Fault(
        "disk", "mount -t tmpfs -o size=900m tmpfs {root}", "MiB are free", "umount -l {root}",
        severity="warning",
    ),
    "read-only disk": Fault(
        "disk", "mount --bind {root} {root} && mount -o remount,ro,bind {root}",
        "Read-only file system", "umount -l {root}",
    ),
    "a directory of its own": Fault(
        "shared folder", "mount -t tmpfs -o size=4g tmpfs {root}", "is a different directory there",
        "umount -l {root}", severity="warning",
    ),
    "locks that others do not see": Fault(
        "locks",
        "mkdir -p /tmp/over/up /tmp/over/work && mount -t overlay overlay "
        "-o lowerdir={root},upperdir=/tmp/over/up,workdir=/tmp/over/work {root}",
        "is not visible to other hosts", "umount -l {root}; rm -r /tmp/over", severity="warning",
    ),
    "a missing locale": Fault(
        "locale", BASHRC.format(line="export LC_ALL=xx_YY.UTF-8"), "LC_ALL=xx_YY.UTF-8",
        "umount -l ~/.bashrc", severity="warning",
    ),
    "another Python in front on PATH": Fault(
        "python",
        "mkdir -p /tmp/other && ln -sf /usr/bin/env /tmp/other/python",
        "`python` is /tmp/other/python", "rm -r /tmp/other",
    ),
    "a GPU with errors": Fault(
        "gpu",
        "mkdir -p /tmp/gpu && printf '%s\\n' '#!/bin/sh' "
        "'echo NVIDIA H200, 570.1, 3, 16, 16, Not Active, Not Active' > /tmp/gpu/nvidia-smi && "
        "chmod +x /tmp/gpu/nvidia-smi && " + BASHRC.format(line="export PATH=$PATH:/tmp/gpu"),
        "3 memory errors", "umount -l ~/.bashrc", where="node2, GPU 0",
    ),
    "too many ranks": Fault(
        "memory", "true", "are free for 900 ranks", "true", hosts="node1:1,node2:900",
    ),
    "more ranks than cores": Fault(
        "cores", "true", "ranks for", "true", severity="warning", hosts="node1:1,node2:900",
    ),
    "another version": Fault(
        "versions",
        "sed 's/^__version__ = .*/__version__ = \"0.0.7\"/' {package}/version.py > /tmp/version.py "
        "&& mount --bind /tmp/version.py {package}/version.py",
        "hvdtrain 0.0.7", "umount -l {package}/version.py",
    ),
    "other source files": Fault(
        "versions", "mount -t tmpfs tmpfs {package}/presets && touch {package}/presets/new.py",
        "hvdtrain's source files differ", "umount -l {package}/presets",
    ),
    "no mpirun": Fault(
        "mpi", "mount --bind /dev/null $(readlink -f $(command -v mpirun))", "no mpirun is on PATH",
        "umount -l $(readlink -f $(command -v mpirun))",
    ),
    "one address on both hosts": Fault(
        "interfaces",
        "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && "
        "ip link set docker0 up",
        "docker0 has the same address, 172.17.0.1", "ip link delete docker0",
        on="node1 node2", where="node1, node2",
    ),
}  # fmt: skip

# Faults that are created together; faults of one file or directory are in different groups.
TOGETHER = (
    ("own name", "small /dev/shm", "few open files", "full disk", "a missing locale"),
    ("the name of another", "nearly full disk", "another Python in front on PATH", "no mpirun"),
    ("a GPU with errors", "read-only disk", "another version", "one address on both hosts"),
    ("a directory of its own", "other source files"),
    ("too many ranks", "more ranks than cores", "locks that others do not see"),
)
assert sorted(name for names in TOGETHER for name in names) == sorted(OF_A_HOST)

# Faults on the way to a host: ssh errors, and missing files.
OF_A_LOGIN = {
    "an unknown name": Fault(
        "name", NAMES.format(name="node2"), "this host cannot resolve its name",
        "umount -l /etc/hosts", on="node1",
    ),
    "an unknown host key": Fault(
        "ssh", "true", "its host key is not known here", "rm -f ~/.ssh/known_hosts", fixable=True,
        on="node1",
    ),
    "another host key": Fault(
        "ssh", "ssh-keyscan node1 2>/dev/null | sed s/node1/node2/ > ~/.ssh/known_hosts",
        "its host key differs from the key", "rm -f ~/.ssh/known_hosts", fixable=True, on="node1",
    ),
    "a key that is not allowed": Fault(
        "ssh", "mount --bind /dev/null {directory}/key.pub", "asks for a password",
        "umount -l {directory}/key.pub",
    ),
    "another Python path": Fault(
        "python path", "mount -t tmpfs tmpfs {bin}", "is missing there", "umount -l {bin}",
    ),
    "no hvdtrain": Fault(
        "ssh", "mount -t tmpfs tmpfs {package}", "hvdtrain is not installed in its Python",
        "umount -l {package}",
    ),
    "no such directory": Fault(
        "folder", "mount -t tmpfs tmpfs {shared}", "the working directory", "umount -l {shared}",
    ),
}  # fmt: skip
