"""A part of the doctor's examination: `python -m tests.support.doctored STAGES HOSTS ROOT [FLAGS]`

STAGES are names of examine.STAGES with commas, or "none": then hosts are only asked what they are.
Prints what `hvdtrain doctor --format json` does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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
        root: run.root, a folder that all hosts see.
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
        """What it finds with these stages.

        Args:
            prefix: a command that starts it in another way.
        """
        module = [*prefix, "python", "-m", "tests.support.doctored", ",".join(stages) or "none"]
        variables = {"PYTHONPATH": str(REPOSITORY), **(env or {})}
        argv = [*module, hosts, str(self.root), *flags]
        done = self.cluster.run("node1", argv, variables, cwd, timeout=100)
        assert done.returncode == 0, done
        return list(json.loads(done.stdout)["findings"])

    def on(self, host: str, *commands: str) -> None:
        """Runs commands of a shell on a host; they must succeed."""
        for command in commands:
            done = self.cluster.run(host, ["bash", "-c", command], cwd=Path("/"))
            assert done.returncode == 0, done


def named(findings: Findings, check: str, where: str) -> dict[str, Any]:
    """The one finding of a check at a place."""
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
