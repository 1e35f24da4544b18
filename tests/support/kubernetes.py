"""Output of `hvdtrain deploy kubernetes`, built by kubectl and checked against schemas."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.cluster import Cluster
from tests.support.job import Job
from tests.support.runs import REPOSITORY

Object = dict[str, Any]
# Of objects that are not Kubernetes' own.
_OWN_SCHEMAS = REPOSITORY / "tests/data/kubernetes"


def build(directory: Path) -> list[Object]:
    """Return the objects of a kustomization, as `kubectl apply -k` sends them."""
    if shutil.which("kubectl") is None and os.environ.get("CI") == "true":
        pytest.fail("kubectl is not installed (Debian's package kubernetes-client)")
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def problems(found: Object) -> Iterator[str]:
    """Return the errors of Kubernetes' schemas or our own, including unknown keys."""
    name = f"{found['kind']} {found['metadata']['name']}"
    own = _OWN_SCHEMAS / f"{found['kind'].lower()}.yaml"
    if own.exists():
        schema = yaml.safe_load(own.read_text())
        validator = jsonschema.Draft202012Validator(schema)
        yield from (
            f"{name}: {error.json_path}: {error.message}" for error in validator.iter_errors(found)
        )
        return
    try:
        kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{name}: {error}"


# As in a pod, no other name can be resolved.
OWN_NAME = """\
set -eu
address=$(ip -4 -o address show eth0 | sed -E 's/.* inet ([0-9.]+).*/\\1/')
printf '127.0.0.1 localhost\\n%s %s\\n' "$address" "$(hostname)" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
"""
_FIRST_PROCESS = r"\S*python\S* \S*(hvdtrain launch|-m hvdtrain\.cli agent) "


class Pods:
    """Manual replacement of the Job controller.

    Args:
        cluster: with a host for each index, named like its pod.
        job: the Job.
        env: environment of the containers, in addition to their own.
    """

    def __init__(self, cluster: Cluster, job: Object, env: Mapping[str, str]) -> None:
        self._cluster, self._env = cluster, env
        self._name = job["metadata"]["name"]
        (container,) = job["spec"]["template"]["spec"]["containers"]
        argv = [*container["command"], *container["args"]]
        self._argv = [word.replace("$$(", "$(") for word in argv]

    def host(self, index: int) -> str:
        return f"{self._name}-{index}"

    def start(self, index: int) -> Job:
        """Start the pod of an index on a host that has just booted."""
        done = self._cluster.run(self.host(index), ["sh", "-c", OWN_NAME])
        assert done.returncode == 0, done
        own = {"JOB_COMPLETION_INDEX": str(index), "PYTHONPATH": str(REPOSITORY)}
        return self._cluster.start(self.host(index), self._argv, {**self._env, **own})

    def terminate(self, index: int) -> None:
        """Send SIGTERM to the container's first process, as an eviction does."""
        found = self._cluster.processes(self.host(index))
        os.kill(next(p.pid for p in found if re.match(_FIRST_PROCESS, p.command)), signal.SIGTERM)

    def lose(self, index: int) -> None:
        """End a pod like the failure of its node."""
        self._cluster.kill_host(self.host(index))

    def replace(self, index: int) -> Job:
        """Start a new pod in place of one that has ended or never existed."""
        if self._cluster.is_up(self.host(index)):
            self._cluster.kill_host(self.host(index))
        self._cluster.boot(self.host(index))
        return self.start(index)
