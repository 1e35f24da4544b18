"""Output of `hvdtrain deploy kubernetes`, built by kubectl and checked against schemas."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
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
# Own schemas, because the MPI operator's has 670 kB, most of it Kubernetes' pods.
_OWN_SCHEMAS = REPOSITORY / "tests/data/kubernetes"
_FIRST_WITH_TODAYS_KEYS = (1, 21)


def build(directory: Path) -> list[Object]:
    """Return the objects of a kustomization, as `kubectl apply -k` sends them."""
    command = ["kubectl", "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def readable_by_this_kubectl(directory: Path) -> None:
    """Rename keys for kubectl 1.20 of Debian 12, whose Kustomize has older names for some."""
    if _kubectl_version() >= _FIRST_WITH_TODAYS_KEYS:
        return
    for path in directory.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        directories = [name for name in content["resources"] if not name.endswith(".yaml")]
        content["resources"] = [name for name in content["resources"] if name not in directories]
        content["bases"] = directories
        content["patchesJson6902"] = content.pop("patches", [])
        path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value}))


def _kubectl_version() -> tuple[int, int]:
    if shutil.which("kubectl") is None and os.environ.get("CI") == "true":
        pytest.fail("kubectl is not installed (Debian's package kubernetes-client)")
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "version", "--client", "--output=yaml"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"gitVersion: v(\d+)\.(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def problems(found: Object) -> Iterator[str]:
    """Return the errors of Kubernetes' schemas or the operator's, including unknown keys."""
    name = f"{found['kind']} {found['metadata']['name']}"
    own = _OWN_SCHEMAS / f"{found['kind'].lower()}.yaml"
    if own.exists():
        schema = yaml.safe_load(own.read_text())
        validator = jsonschema.Draft202012Validator(schema)
        yield from (
            f"{name}: {error.json_path}: {error.message}" for error in validator.iter_errors(found)
        )
        for pods in templates(found):
            whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
            yield from _problems_of_core(name, {**whole, "template": pods})
    else:
        yield from _problems_of_core(name, found)


def _problems_of_core(name: str, found: Object) -> Iterator[str]:
    try:
        kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{name}: {error}"


def templates(found: Object) -> list[Object]:
    """Return the pod templates of an object."""
    if found["kind"] == "MPIJob":
        return [part["template"] for part in found["spec"]["mpiReplicaSpecs"].values()]
    return [found["spec"]["template"]] if found["kind"] == "Job" else []


# Mounts that give a host the files of a container: /etc with a node's configuration, the Secret's
# files, a user (here another name for root), and programs at their paths in the image.
IMAGE = """\
set -eu
cp -a /etc /tmp/etc && mount --bind /tmp/etc /etc
sed -E -i 's/ ({job}-[0-9]+)$/ \\1 \\1.{service}/' /etc/hosts
mkdir -p /etc/hvdtrain/keys
cp {docker}/sshd_config /etc/hvdtrain/ && cp {docker}/ssh_config /etc/ssh/ssh_config
cp {keys}/id_rsa {keys}/id_rsa.pub /etc/hvdtrain/keys/
sed -i 's#^root:.*#root:x:0:0::/home/hvdtrain:/bin/bash#' /etc/passwd
echo 'hvdtrain:x:0:0::/home/hvdtrain:/bin/bash' >> /etc/passwd
echo 'hvdtrain:*:19000:0:99999:7:::' >> /etc/shadow
for directory in /home /opt /usr/local/bin; do mount -t tmpfs -o mode=755 tmpfs $directory; done
mkdir -p -m 700 /home/hvdtrain/.ssh
ln -s {prefix} /opt/hvdtrain
install {docker}/start /usr/local/bin/training-node
"""


class Pods:
    """Manual replacement of the Job controller.

    Args:
        cluster: with a host for each index, named like its pod.
        job: the Job.
        service: its headless Service.
        env: environment of the containers, in addition to their own.
    """

    def __init__(
        self, cluster: Cluster, job: Object, service: Object, env: Mapping[str, str]
    ) -> None:
        self._cluster, self._env = cluster, env
        self._name, self._service = job["metadata"]["name"], service["metadata"]["name"]
        (self._container,) = job["spec"]["template"]["spec"]["containers"]
        self._keys = cluster.shared / "keys"
        self._keys.mkdir()
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._keys / "id_rsa")]
        assert cluster.run(cluster.names[0], make).returncode == 0

    def host(self, index: int) -> str:
        return f"{self._name}-{index}"

    def start(self, index: int) -> Job:
        """Start the pod of an index on a host that has just booted."""
        image = IMAGE.format(
            job=self._name,
            service=self._service,
            docker=REPOSITORY / "docker/node",
            keys=self._keys,
            prefix=sys.prefix,
        )
        done = self._cluster.run(self.host(index), ["sh", "-c", image])
        assert done.returncode == 0, done
        given = {entry["name"]: entry["value"] for entry in self._container["env"]}
        own = {"JOB_COMPLETION_INDEX": str(index), "HOME": "/home/hvdtrain"}
        own["PYTHONPATH"] = str(REPOSITORY)  # the task of the test
        return self._cluster.start(self.host(index), self._argv(), {**self._env, **given, **own})

    def terminate(self, index: int) -> None:
        """Send SIGTERM to the container's first process, as an eviction does."""
        first = min(
            process.pid
            for process in self._cluster.processes(self.host(index), "/training-node")
            if process.command.startswith("/bin/sh /usr/local/bin/training-node")
        )
        os.kill(first, signal.SIGTERM)

    def replace(self, index: int) -> Job:
        """Start a new pod in place of one that has ended or never existed."""
        if self._cluster.is_up(self.host(index)):
            self._cluster.kill_host(self.host(index))
        self._cluster.boot(self.host(index))
        return self.start(index)

    def _argv(self) -> Sequence[str]:
        every = [*self._container["command"], *self._container.get("args", [])]
        return [word.replace("$$(", "$(") for word in every]
