"""`hvdtrain deploy kubernetes`: built by kubectl, checked by schemas, and consistent."""

from __future__ import annotations

import argparse
import json
from itertools import chain
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands import launch
from hvdtrain.config import parse
from hvdtrain.elastic.command import training_command
from hvdtrain.errors import EXIT_NOT_FINITE, EXIT_PREEMPTED, EXIT_USER
from hvdtrain.launch.hostfile import parse_hosts
from hvdtrain.telemetry.config import TelemetryConfig
from tests.support.kubernetes import (
    Object,
    build,
    problems,
    readable_by_this_kubectl,
    templates,
)
from tests.support.runs import REPOSITORY

KEYS = ["--config", "gpt-nano", "--train.steps", "30", "--data.train", "$(HOME) it's.txt"]
OPTIONS = "--name gpt --nodes 3 --ranks 2 --min-nodes 2 --max-nodes 5 --storage-class nfs"
OVERLAYS = ["cpu", "gpu", "elastic"]
OVERLAY = pytest.mark.parametrize("overlay", OVERLAYS)
SSH_PORT = 2222


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deploy") / "kubernetes"
    assert cli.main(["deploy", "kubernetes", *OPTIONS.split(), f"--out={out}", "--", *KEYS]) == 0
    readable_by_this_kubectl(out)
    return out


@pytest.fixture(scope="module")
def objects(directory: Path) -> dict[str, list[Object]]:
    """Return the objects sent to the cluster for each overlay, and for the monitoring."""
    overlays = {name: build(directory / "overlays" / name) for name in OVERLAYS}
    return overlays | {"monitoring": build(directory / "monitoring")}


def one(found: list[Object], kind: str) -> Object:
    (only,) = [entry for entry in found if entry["kind"] == kind]
    return only


def words(container: Object) -> list[str]:
    """Return a container's command, without the shell that reads the pod's index."""
    every = [*container["command"], *container.get("args", [])]
    return [word.replace("$$(", "$(") for word in every]


@pytest.mark.parametrize("name", [*OVERLAYS, "monitoring"])
def test_objects_conform_to_the_kubernetes_schemas(
    objects: dict[str, list[Object]], name: str
) -> None:
    assert list(chain.from_iterable(map(problems, objects[name]))) == []


def test_schemas_reject_unknown_fields(objects: dict[str, list[Object]]) -> None:
    def with_mistake(kind: str, overlay: str, *path: str | int) -> list[str]:
        broken = json.loads(json.dumps(one(objects[overlay], kind)))
        inner = broken
        for key in path:
            inner = inner[key]
        inner["wrogn"] = 1
        return list(problems(broken))

    container = ("template", "spec", "containers", 0)
    assert with_mistake("MPIJob", "cpu", "spec")
    assert with_mistake("MPIJob", "cpu", "spec", "mpiReplicaSpecs", "Worker", *container)
    assert with_mistake("Job", "elastic", "spec", *container, "securityContext")
    assert with_mistake("NetworkPolicy", "elastic", "spec", "ingress", 0)
    assert with_mistake("PodMonitor", "monitoring", "spec", "podMetricsEndpoints", 0)


@OVERLAY
def test_pods_satisfy_the_restricted_security_standard(
    objects: dict[str, list[Object]], overlay: str
) -> None:
    for found in chain.from_iterable(map(templates, objects[overlay])):
        pod, (container,) = found["spec"], found["spec"]["containers"]
        security = pod["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] == 10000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all("hostPath" not in volume for volume in pod.get("volumes", []))


@OVERLAY
def test_network_policy_isolates_pods_but_lets_ranks_communicate(
    objects: dict[str, list[Object]], overlay: str
) -> None:
    policy = one(objects[overlay], "NetworkPolicy")["spec"]
    chosen = policy["podSelector"]["matchLabels"].items()
    for found in chain.from_iterable(map(templates, objects[overlay])):
        assert chosen <= found["metadata"]["labels"].items()
    among_them, metrics = policy["ingress"]
    assert among_them == {"from": [{"podSelector": {"matchLabels": dict(chosen)}}]}
    (ports,) = metrics["ports"]
    first = TelemetryConfig().port
    assert (ports["port"], ports["endPort"]) == (first, first + 1)


@OVERLAY
def test_node_mounts_its_volumes_and_exposes_its_ports(
    objects: dict[str, list[Object]], overlay: str
) -> None:
    pod = next(
        found["spec"]
        for found in chain.from_iterable(map(templates, objects[overlay]))
        if found["metadata"]["labels"]["app.kubernetes.io/component"] == "node"
    )
    (container,) = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted.items() >= {"runs": "/runs", "shm": "/dev/shm"}.items()
    assert mounted.keys() == volumes.keys()
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    claim = one(objects[overlay], "PersistentVolumeClaim")
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == "nfs"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    first = TelemetryConfig().port
    assert ports == {"ssh": SSH_PORT, "metrics-0": first, "metrics-1": first + 1}
    assert f"Port {SSH_PORT}\n" in (REPOSITORY / "docker/node/sshd_config").read_text()
    assert pod["terminationGracePeriodSeconds"] == 120
    assert container["resources"]["limits"].get("nvidia.com/gpu") == (
        2 if overlay == "gpu" else None
    )


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_mpi_job_starts_the_requested_ranks_with_valid_keys(
    objects: dict[str, list[Object]], overlay: str
) -> None:
    job = one(objects[overlay], "MPIJob")["spec"]
    launcher, worker = job["mpiReplicaSpecs"]["Launcher"], job["mpiReplicaSpecs"]["Worker"]
    containers = [part["template"]["spec"]["containers"][0] for part in (launcher, worker)]
    image = "hvdtrain:cuda" if overlay == "gpu" else "hvdtrain:"
    assert all(container["image"].startswith(image) for container in containers)
    argv = words(containers[0])
    assert argv[:4] == ["training-node", "mpirun", "-np", "6"]
    assert job["slotsPerWorker"] * worker["replicas"] == 6
    command = training_command(argv[argv.index("python") :])
    assert command is not None and KEYS[-1] in command.flags
    config = parse(command.flags).config
    assert (config.run.root, config.run.id, config.train.steps) == ("/runs", "gpt", 30)
    assert words(containers[1]) == ["training-node"]
    # Where training-node reads the keys that the operator creates.
    start = (REPOSITORY / "docker/node/start").read_text()
    assert f"given={job['sshAuthMountPath']}\n" in start and "$given/id_rsa.pub" in start
    assert launcher["restartPolicy"] == "OnFailure", "75 would end the job"


def test_elastic_job_names_the_hosts_of_its_pods_with_valid_flags(
    objects: dict[str, list[Object]],
) -> None:
    job, service = one(objects["elastic"], "Job"), one(objects["elastic"], "Service")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    argv = words(pod["containers"][0])
    assert argv[:2] == ["sh", "-c"] and 'exec training-node hvdtrain launch "$@"' in argv[2]
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    args = parser.parse_args(argv[4:])
    names = [f"{job['metadata']['name']}-{n}.{service['metadata']['name']}" for n in range(5)]
    assert [host.name for host in parse_hosts(args.hosts)] == names
    assert pod["subdomain"] == service["metadata"]["name"] and spec["completionMode"] == "Indexed"
    labels = spec["template"]["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= labels
    assert service["spec"]["clusterIP"] == "None"
    assert (args.probe, args.controller) == (f"tcp:{SSH_PORT}", "gloo")
    assert (args.min_np, args.max_np, spec["parallelism"], spec["completions"]) == (4, 10, 3, 3)
    config = parse(args.training[1:]).config
    assert (config.run.root, config.run.id, config.train.steps) == ("/runs", "gpt", 30)
    assert KEYS[-1] in args.training
    assert one(objects["elastic"], "PodDisruptionBudget")["spec"]["minAvailable"] == 2


def test_exit_code_decides_whether_the_job_restarts(
    objects: dict[str, list[Object]],
) -> None:
    spec = one(objects["elastic"], "Job")["spec"]
    by_code = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_code == {EXIT_USER: "FailJob", EXIT_NOT_FINITE: "FailJob", EXIT_PREEMPTED: "Ignore"}
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "the policy asks for it"


def test_pod_monitor_matches_the_pods_and_ships_the_dashboard(
    objects: dict[str, list[Object]],
) -> None:
    spec = one(objects["monitoring"], "PodMonitor")["spec"]
    pods = list(chain.from_iterable(map(templates, [*objects["cpu"], *objects["elastic"]])))
    chosen = spec["selector"]["matchLabels"].items()
    nodes = [pod for pod in pods if chosen <= pod["metadata"]["labels"].items()]
    assert len(nodes) == 2, "of the MPI job and of the elastic job"
    for pod in nodes:
        ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]} == ports - {"ssh"}
    for endpoint in spec["podMetricsEndpoints"]:
        labels = {rule["targetLabel"] for rule in endpoint["relabelings"]}
        assert labels == {"job", "run", "rank", "local_rank", "host"}, "the labels of targets.json"
    configured = one(objects["monitoring"], "ConfigMap")
    dashboard = REPOSITORY / "hvdtrain/deploy/dashboards/hvdtrain.json"
    assert configured["data"] == {"hvdtrain.json": dashboard.read_text()}
    assert configured["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert configured["metadata"]["name"] == "gpt-dashboard"


def test_elastic_job_requests_the_gpus_of_a_node(tmp_path: Path) -> None:
    assert cli.main(["deploy", "kubernetes", "--gpus", f"--out={tmp_path}"]) == 0
    readable_by_this_kubectl(tmp_path)
    job = one(build(tmp_path / "overlays/elastic"), "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert container["image"] == "hvdtrain:cuda"
