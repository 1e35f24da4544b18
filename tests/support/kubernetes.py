"""What `hvdtrain deploy kubernetes` writes, built by kubectl and checked against schemas."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.runs import REPOSITORY

Object = dict[str, Any]
# Schemas of our own: that of the MPI operator has 670 kB, most of it Kubernetes' own pods.
_OWN_SCHEMAS = REPOSITORY / "tests/data/kubernetes"
_FIRST_WITH_TODAYS_KEYS = (1, 21)


def build(folder: Path) -> list[Object]:
    """The objects of a kustomization, as `kubectl apply -k` sends them."""
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def readable_by_this_kubectl(folder: Path) -> None:
    """Debian 12 has kubectl 1.20, whose Kustomize has older names for some keys: renames them."""
    if _kubectl_version() >= _FIRST_WITH_TODAYS_KEYS:
        return
    for path in folder.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        folders = [name for name in content["resources"] if not name.endswith(".yaml")]
        content["resources"] = [name for name in content["resources"] if name not in folders]
        content["bases"] = folders
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
    """What Kubernetes, or the operator whose object it is, would not take; unknown keys too."""
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
    """The pods that an object makes."""
    if found["kind"] == "MPIJob":
        return [part["template"] for part in found["spec"]["mpiReplicaSpecs"].values()]
    return [found["spec"]["template"]] if found["kind"] == "Job" else []
