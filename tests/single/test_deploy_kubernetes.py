"""`hvdtrain deploy kubernetes` and `trainjob`: built by kubectl, checked by schemas."""

from __future__ import annotations

import argparse
import json
from itertools import chain
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands import launch
from hvdtrain.config import parse
from hvdtrain.errors import EXIT_NOT_FINITE, EXIT_PREEMPTED, EXIT_USER
from hvdtrain.telemetry.config import TelemetryConfig
from tests.support.kubernetes import Object, build, problems
from tests.support.runs import REPOSITORY

KEYS = ["--config", "gpt-nano", "--train.duration", "30", "--data.train", "$(HOME) it's.txt"]
OPTIONS = "--name gpt --nodes 3 --ranks 2 --min-nodes 2 --storage-class nfs"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deploy") / "kubernetes"
    assert cli.main(["deploy", "kubernetes", *OPTIONS.split(), f"--out={out}", "--", *KEYS]) == 0
    return out


@pytest.fixture(scope="module")
def objects(directory: Path) -> list[Object]:
    """Return the objects of the job that are sent to the cluster."""
    return build(directory)


@pytest.fixture(scope="module")
def monitoring(directory: Path) -> list[Object]:
    return build(directory / "monitoring")


def one(found: list[Object], kind: str) -> Object:
    (only,) = [entry for entry in found if entry["kind"] == kind]
    return only


def template(found: list[Object]) -> Object:
    pods: Object = one(found, "Job")["spec"]["template"]
    return pods


def test_objects_conform_to_the_kubernetes_schemas(
    objects: list[Object], monitoring: list[Object]
) -> None:
    assert list(chain.from_iterable(map(problems, [*objects, *monitoring]))) == []


def test_schemas_reject_unknown_fields(objects: list[Object], monitoring: list[Object]) -> None:
    def with_mistake(kind: str, *path: str | int) -> list[str]:
        broken = json.loads(json.dumps(one([*objects, *monitoring], kind)))
        inner = broken
        for key in path:
            inner = inner[key]
        inner["wrogn"] = 1
        return list(problems(broken))

    container = ("template", "spec", "containers", 0)
    assert with_mistake("Job", "spec", *container, "securityContext")
    assert with_mistake("NetworkPolicy", "spec", "ingress", 0)
    assert with_mistake("PodMonitor", "spec", "podMetricsEndpoints", 0)


def test_pods_satisfy_the_restricted_security_standard(objects: list[Object]) -> None:
    pod = template(objects)["spec"]
    (container,) = pod["containers"]
    security = pod["securityContext"]
    assert security["runAsNonRoot"] and security["runAsUser"] == 10000
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all("hostPath" not in volume for volume in pod["volumes"])


def test_network_policy_isolates_pods_but_lets_ranks_communicate(objects: list[Object]) -> None:
    policy = one(objects, "NetworkPolicy")["spec"]
    chosen = policy["podSelector"]["matchLabels"].items()
    assert chosen <= template(objects)["metadata"]["labels"].items()
    among_them, metrics = policy["ingress"]
    assert among_them == {"from": [{"podSelector": {"matchLabels": dict(chosen)}}]}
    (ports,) = metrics["ports"]
    first = TelemetryConfig().port
    assert (ports["port"], ports["endPort"]) == (first, first + 1)


def test_pod_mounts_its_volumes_and_exposes_only_metrics(objects: list[Object]) -> None:
    pod = template(objects)["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted == {"runs": "/runs", "shm": "/dev/shm"}
    assert mounted.keys() == volumes.keys()
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    claim = one(objects, "PersistentVolumeClaim")
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == "nfs"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    first = TelemetryConfig().port
    assert ports == {"metrics-0": first, "metrics-1": first + 1}
    assert pod["terminationGracePeriodSeconds"] == 120
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_pods_run_the_same_launch_with_valid_flags(objects: list[Object]) -> None:
    spec, (container,) = one(objects, "Job")["spec"], template(objects)["spec"]["containers"]
    assert container["command"] == ["hvdtrain", "launch"]
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    args = parser.parse_args([word.replace("$$(", "$(") for word in container["args"]])
    assert not (args.hosts or args.hostfile or args.slurm), "agents, without ssh"
    assert (args.slots, args.min_np, args.max_np) == (2, 4, None)
    assert (spec["parallelism"], spec["completions"]) == (3, 3)
    assert spec["completionMode"] == "Indexed", "a new pod has the host name of the old one"
    config = parse(args.training[1:]).config
    assert (config.run.root, config.run.id, config.train.steps) == ("/runs", "gpt", 30)
    assert KEYS[-1] in args.training
    assert one(objects, "PodDisruptionBudget")["spec"]["minAvailable"] == 2


def test_exit_code_decides_whether_the_job_restarts(objects: list[Object]) -> None:
    spec = one(objects, "Job")["spec"]
    by_code = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_code == {EXIT_USER: "FailJob", EXIT_NOT_FINITE: "FailJob", EXIT_PREEMPTED: "Ignore"}
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "the policy asks for it"


def test_pod_monitor_matches_the_pods_and_ships_the_dashboard(
    objects: list[Object], monitoring: list[Object]
) -> None:
    spec, pod = one(monitoring, "PodMonitor")["spec"], template(objects)
    assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]} == ports
    for endpoint in spec["podMetricsEndpoints"]:
        labels = {rule["targetLabel"] for rule in endpoint["relabelings"]}
        assert labels == {"job", "run", "rank", "local_rank", "host"}, "the labels of targets.json"
    configured = one(monitoring, "ConfigMap")
    dashboard = REPOSITORY / "hvdtrain/deploy/dashboards/hvdtrain.json"
    assert configured["data"] == {"hvdtrain.json": dashboard.read_text()}
    assert configured["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert configured["metadata"]["name"] == "gpt-dashboard"


def test_job_requests_the_gpus_of_a_node(tmp_path: Path) -> None:
    assert cli.main(["deploy", "kubernetes", "--gpus", f"--out={tmp_path}"]) == 0
    (container,) = template(build(tmp_path))["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert container["image"] == "hvdtrain:cuda"


@pytest.fixture(scope="module")
def train_job(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    out = tmp_path_factory.mktemp("deploy") / "trainjob"
    assert cli.main(["deploy", "trainjob", *OPTIONS.split(), f"--out={out}", "--", *KEYS]) == 0
    return [*build(out), *build(out / "monitoring")]


def test_train_job_conforms_to_the_schemas_of_kubeflow_trainer(train_job: list[Object]) -> None:
    kinds = {found["kind"] for found in train_job}
    assert {"TrainJob", "TrainingRuntime", "PersistentVolumeClaim", "PodMonitor"} <= kinds
    assert list(chain.from_iterable(map(problems, train_job))) == []
    broken = json.loads(json.dumps(one(train_job, "TrainJob")))
    broken["spec"]["trainer"]["nodes"] = 3
    assert list(problems(broken))


def test_train_job_runs_the_pods_of_the_kubernetes_job(
    objects: list[Object], train_job: list[Object]
) -> None:
    runtime, own = one(train_job, "TrainingRuntime"), one(train_job, "TrainJob")["spec"]
    assert own["runtimeRef"] == {
        "apiGroup": runtime["apiVersion"].partition("/")[0],
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    (nodes,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # What Kubeflow Trainer requires of the job that it sizes: this label, name and container.
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (nodes["name"], nodes["replicas"]) == ("node", 1)
    assert nodes["template"]["metadata"]["labels"] == label
    job = one(objects, "Job")
    counts = dict.fromkeys(("completions", "parallelism"), own["trainer"]["numNodes"])
    assert nodes["template"]["spec"] | counts == job["spec"]
