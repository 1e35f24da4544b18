"""The pods of an Indexed Job as processes on hosts: their names, environment and commands."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from tests.support.cluster import Cluster
from tests.support.job import Job
from tests.support.kubernetes import Object
from tests.support.runs import REPOSITORY

# What a container of the image sees, by mounts of its own: /etc with the configuration of a node,
# the Secret's files, a user (here another name for root), and programs under their paths there.
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
for folder in /home /opt /usr/local/bin; do mount -t tmpfs -o mode=755 tmpfs $folder; done
mkdir -p -m 700 /home/hvdtrain/.ssh
ln -s {prefix} /opt/hvdtrain
install {docker}/start /usr/local/bin/training-node
"""


class Pods:
    """What the controller of Jobs does, by hand.

    Args:
        cluster: with a host for each index, named as its pod is.
        job: the Job.
        service: its headless Service.
        env: of the containers, beside their own.
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
        """Starts the pod of an index on a host that has just booted."""
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
        """SIGTERM to the first process of the container, as an eviction sends it."""
        first = min(
            process.pid
            for process in self._cluster.processes(self.host(index), "/training-node")
            if process.command.startswith("/bin/sh /usr/local/bin/training-node")
        )
        os.kill(first, signal.SIGTERM)

    def replace(self, index: int) -> Job:
        """A new pod in the place of one that has ended, or was never there."""
        if self._cluster.is_up(self.host(index)):
            self._cluster.kill_host(self.host(index))
        self._cluster.boot(self.host(index))
        return self.start(index)

    def _argv(self) -> Sequence[str]:
        every = [*self._container["command"], *self._container.get("args", [])]
        return [word.replace("$$(", "$(") for word in every]
