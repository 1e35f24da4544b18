"""Generate the files of each target from the templates."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from importlib import resources

import jinja2

from hvdtrain.deploy.job import Job

# File name -> text; a single file has its default name as key.
Files = dict[str, str]

_KUBERNETES = (
    "base/kustomization.yaml",
    "base/runs.yaml",
    "base/network.yaml",
    "overlays/cpu/kustomization.yaml",
    "overlays/cpu/mpijob.yaml",
    "overlays/cpu/disruption.yaml",
    "overlays/gpu/kustomization.yaml",
    "overlays/gpu/gpus.yaml",
    "overlays/elastic/kustomization.yaml",
    "overlays/elastic/job.yaml",
    "overlays/elastic/disruption.yaml",
    "monitoring/kustomization.yaml",
    "monitoring/podmonitor.yaml",
)


def _one_file(name: str, template: str, **more: object) -> Callable[[Job], Files]:
    def make(job: Job) -> Files:
        file = name if job.out is None else str(job.out)
        return {name: _render(template, job, file=file, **more)}

    return make


def _kubernetes(job: Job) -> Files:
    files = {name: _render(f"kubernetes/{name}", job) for name in _KUBERNETES}
    dashboard = resources.files("hvdtrain") / "deploy/dashboards/hvdtrain.json"
    return files | {"monitoring/hvdtrain.json": dashboard.read_text()}


TARGETS: dict[str, Callable[[Job], Files]] = {
    "slurm": _one_file("train.sbatch", "slurm.sh"),
    "pbs": _one_file("train.pbs", "batch.sh", scheduler="pbs"),
    "lsf": _one_file("train.lsf", "batch.sh", scheduler="lsf"),
    "mpirun": _one_file("train.sh", "batch.sh", scheduler="none"),
    "compose": _one_file("compose.yaml", "compose.yaml"),
    "kubernetes": _kubernetes,
}


def _render(template: str, job: Job, **more: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hvdtrain", "deploy/templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {
        "sh": shlex.quote,
        "yaml": _yaml,
        "argument": _argument,
        "dollars": _dollars,
    }
    return environment.get_template(template).render(job=job, **more)


def _yaml(text: str) -> str:
    """Quote a string for YAML; JSON strings are valid YAML."""
    return json.dumps(text, ensure_ascii=False)


def _argument(text: str) -> str:
    """Quote a container argument for YAML; Kubernetes would replace $(NAME) in it."""
    return _yaml(text.replace("$(", "$$("))


def _dollars(text: str) -> str:
    """Escape $NAME, which Compose would replace."""
    return text.replace("$", "$$")
