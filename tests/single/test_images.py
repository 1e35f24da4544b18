"""docker/: files exist, versions are pinned, no secrets are stored, and services fit together.

`make images`, which requires a Docker engine, tests that the images build and train.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import hvdtrain
from hvdtrain.horovod_wheel.build import MODULES, PROGRAMS

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
NODES = ("node1", "node2")
FILES = pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])


def instructions(name: str) -> list[list[str]]:
    """Return the words of each instruction, with lines joined and without comments."""
    text = re.sub(r"^#.*\n", "", (DOCKER / name).read_text(), flags=re.MULTILINE)
    return [shlex.split(line) for line in text.replace("\\\n", "").splitlines() if line.strip()]


def copied(name: str) -> list[str]:
    """Return the files that an image copies from the repository."""
    copies = [words[1:-1] for words in instructions(name) if words[0] == "COPY"]
    return [source for sources in copies if "--from=builder" not in sources for source in sources]


def mounts(service: str) -> dict[str, str]:
    """Return path in the container -> path here, or a volume's name."""
    split = [mount.split(":") for mount in SERVICES[service]["volumes"]]
    return {there: here for here, there, *_ in split}


@FILES
def test_image_copies_only_existing_files_in_build_context(name: str) -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    context = [line[1:] for line in lines if line.startswith("!")]
    assert "*" in lines
    for source in copied(name):
        assert (REPOSITORY / source).exists(), source
        assert any(f"{source}/".startswith(f"{kept}/") for kept in context), source
    every = [*copied("Dockerfile"), *copied("Dockerfile.cuda")]
    unused = [kept for kept in context if not any(s.startswith(kept) for s in every)]
    assert unused == []


@FILES
def test_image_installs_horovod_build_dependencies(name: str) -> None:
    installed = {word for words in instructions(name) if words[0] == "RUN" for word in words}
    assert set(PROGRAMS.values()) | {"python3-dev"} <= installed


def test_apptainer_definition_matches_the_dockerfile() -> None:
    text = (DOCKER / "hvdtrain.def").read_text()
    files = re.search(r"^%files\n((?: .+\n)+)", text, re.MULTILINE)
    assert files is not None
    pairs = [line.split() for line in files[1].splitlines()]
    assert all(there == f"/src/{here}" for here, there in pairs)  # one file per line
    assert {here for here, _ in pairs} == set(copied("Dockerfile"))
    (base,) = [words[1] for words in instructions("Dockerfile") if words[0] == "ARG"][:1]
    assert f"From: {base.removeprefix('BASE=')}\n" in text
    for words in instructions("Dockerfile"):
        if "apt-get" in words:
            packages = words[words.index("--no-install-recommends") + 1 :]
            assert set(packages[: packages.index("&&")]) <= set(re.findall(r"[\w+-]+", text))


def test_python_packages_in_images_are_pinned() -> None:
    lines = (DOCKER / "requirements.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert [str(pin) for pin in pins if not str(pin.specifier).startswith("==")] == []
    pinned = {pin.name: pin for pin in pins}
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    needed = config["options"]["install_requires"] + config["options.extras_require"]["horovod"]
    for line in filter(None, needed.splitlines()):
        wanted = Requirement(line)
        if wanted.name != "torch":  # pinned in .ci/constraints.txt
            version = str(pinned[wanted.name].specifier).removeprefix("==")
            assert wanted.specifier.contains(version), line
    assert set(MODULES.values()) - {"torch", "pip"} <= pinned.keys()
    assert re.search(r"^torch==", (REPOSITORY / ".ci/constraints.txt").read_text(), re.MULTILINE)


def test_image_tags_are_pinned_to_versions() -> None:
    arguments = {
        word.partition("=")[0]: word.partition("=")[2]
        for name in ("Dockerfile", "Dockerfile.cuda")
        for words in instructions(name)
        if words[0] == "ARG" and "=" in words[1]
        for word in words[1:]
    }
    bases = [
        re.sub(r"\$(\w+)", lambda found: arguments[found[1]], words[1])
        for name in ("Dockerfile", "Dockerfile.cuda")
        for words in instructions(name)
        if words[0] == "FROM" and words[1] != "base"
    ]
    assert len(bases) == 3
    for image in [*bases, *(service["image"] for service in SERVICES.values())]:
        assert re.fullmatch(r"[\w./-]+:v?\d+(\.\d+)+[\w.-]*", image), image
    ours = {SERVICES[name]["image"] for name in NODES}
    assert ours == {f"hvdtrain:{hvdtrain.__version__}"}


@FILES
def test_image_runs_as_an_unprivileged_user(name: str) -> None:
    words = instructions(name)
    assert [line for line in words if line[0] == "USER"] == [["USER", "hvdtrain"]]
    (user,) = [line for line in words if "useradd" in line]
    assert user[user.index("--uid") + 1] == "10000"  # of the pods, too
    assert user[user.index("/runs") - 1] == "hvdtrain", "the owner of /runs"


def test_services_run_with_least_privilege() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "user", "cap_add", "network_mode"} & service.keys(), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


@FILES
def test_images_contain_no_ssh_server(name: str) -> None:
    text = (DOCKER / name).read_text()
    assert "ssh-keygen" not in text and "openssh-server" not in text


def test_docker_directory_contains_no_secrets() -> None:
    secret = re.compile(r"PRIVATE KEY|(password|secret|token)\w*['\"]?\s*[:=]\s*['\"]?\w", re.I)
    public = re.compile(r"password_file|GF_SECURITY_DISABLE")
    for path in (path for path in DOCKER.rglob("*") if path.is_file()):
        for line in path.read_text(errors="replace").splitlines():
            assert not secret.search(line) or public.search(line), f"{path}: {line}"


def test_long_running_services_have_health_checks() -> None:
    lasting = SERVICES.keys() - set(NODES)
    assert {name for name in SERVICES if "healthcheck" in SERVICES[name]} == lasting
    assert SERVICES["grafana"]["depends_on"] == {"prometheus": {"condition": "service_healthy"}}


def test_mounted_paths_and_volumes_exist() -> None:
    for name in SERVICES:
        for there, here in mounts(name).items():
            where = DOCKER / here if here.startswith(".") else here
            assert where in COMPOSE["volumes"] or Path(where).exists(), f"{name}: {there}"


def test_nodes_share_runs_and_start_the_same_command() -> None:
    for name in NODES:
        assert mounts(name) == {"/runs": "runs"}
        assert SERVICES[name]["hostname"] == name  # a run's targets name it
        words = shlex.split(SERVICES[name]["command"])
        assert words[:2] == ["hvdtrain", "launch"] and "--run.root /runs" in " ".join(words)
    assert SERVICES["node1"]["command"] == SERVICES["node2"]["command"]


def test_prometheus_reads_targets_from_runs_volume() -> None:
    inside = mounts("prometheus")
    assert inside["/runs"] == "runs"
    configuration = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())
    files = configuration["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert all(file.startswith("/runs/") for file in files)
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]
    assert inside["/etc/prometheus"] == "./prometheus"


def test_grafana_opens_dashboard_and_queries_bundled_prometheus() -> None:
    inside = mounts("grafana")
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    dashboard = DOCKER / inside[str(home.parent)] / home.name
    assert json.loads(dashboard.read_text())["panels"]
    provisioning = DOCKER / inside["/etc/grafana/provisioning"]
    (provider,) = provisioning.glob("dashboards/*.y*ml")
    (directory,) = [p["options"]["path"] for p in yaml.safe_load(provider.read_text())["providers"]]
    assert directory in inside
    (source,) = provisioning.glob("datasources/*.y*ml")
    (url,) = [s["url"] for s in yaml.safe_load(source.read_text())["datasources"]]
    assert url == "http://prometheus:9090"


def test_docker_script_is_executable() -> None:
    assert os.access(DOCKER / "try-images", os.X_OK)
