"""A deployed job: its description, and the files of each target, generated from templates."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import jinja2

from hvdtrain.errors import UserError
from hvdtrain.launch import mpi
from hvdtrain.launch.hostfile import Host, total_slots
from hvdtrain.version import __version__

# Valid as a label of Kubernetes and of DNS, as host names are derived from it. At most 40
# characters, because programs append to it. PBS accepts at most 15 and reports longer names.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_NO_NAMES = ("false", "n", "no", "null", "off", "on", "true", "y", "yes")  # not strings in YAML
_TIME = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
_WORD = re.compile(r"[\w./:@+=,-]+")
# Slurm's signal may come up to this many seconds early.
_SHORTEST_LIMIT = 60


@dataclass(frozen=True)
class Job:
    """A job, as read by the templates.

    Args:
        keys: the configuration's keys, as flags, without run.id
        run_id: run.id, if it was given
        run_root: run.root
        name: job name
        nodes: number of nodes
        ranks: ranks per node
        cpus: CPUs per rank; None: the cluster's default
        gpus: whether each rank has a GPU
        grace: seconds that the ranks have for a last checkpoint
        time: time limit of the job, [D-]HH:MM:SS
        queue: a partition of Slurm, a queue of PBS, LSF or Flux; None: the default one
        donor_time: time limit of a job that lends a node to the run
        donor_queue: its partition; None: the default one
        modules: environment modules to load
        venv: the environment with hvdtrain
        image: a container image with hvdtrain
        gpu_image: the same with CUDA
        hosts: hosts on which mpirun starts ranks
        min_nodes: an elastic job waits if it has fewer nodes
        memory: memory per node, in GiB
        storage: size of the volume for runs, in GiB
        storage_class: class of the volume for runs; None: the cluster's default
        monitoring: the namespace of Prometheus
        out: destination of the files; None: the standard output

    Raises:
        UserError: a value is invalid on any cluster, or conflicts with another value.
    """

    keys: tuple[str, ...] = ()
    run_id: str | None = None
    run_root: str = "runs"
    name: str = "hvdtrain"
    nodes: int = 2
    ranks: int = 8
    cpus: int | None = None
    gpus: bool = False
    grace: int = 120
    time: str = "01:00:00"
    queue: str | None = None
    donor_time: str = "00:20:00"
    donor_queue: str | None = None
    modules: tuple[str, ...] = ()
    venv: str = ".venv"
    image: str | None = None
    gpu_image: str = "hvdtrain:cuda"
    hosts: tuple[Host, ...] = field(default=())
    min_nodes: int = 1
    memory: int = 16
    storage: int = 100
    storage_class: str | None = None
    monitoring: str = "monitoring"
    out: Path | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in _NO_NAMES:
            raise UserError(
                f"--name {self.name}: at most 40 lower-case letters, digits and -, a letter first, "
                "are expected, such as gpt-small"
            )
        words: Mapping[str, str | None] = {
            "--queue": self.queue,
            "--donor-queue": self.donor_queue,
            "run.id": self.run_id,
            "run.root": self.run_root,
            "--out": None if self.out is None else str(self.out),
            "--venv": self.venv,
            "--image": self.image,
            "--gpu-image": self.gpu_image,
            "--storage-class": self.storage_class,
            "--monitoring": self.monitoring,
            **{f"--module {module}": module for module in self.modules},
        }
        for option, word in words.items():
            if word is not None and not _WORD.fullmatch(word):
                raise UserError(f"{option}: {word!r} is not a name or path without spaces")
        if self.limit_seconds < self.grace + _SHORTEST_LIMIT:
            raise UserError(
                f"--time {self.time} leaves less than a minute before the {self.grace} s of "
                "--grace: give more time, or a shorter grace"
            )
        if _seconds("--donor-time", self.donor_time) < _SHORTEST_LIMIT:
            raise UserError(f"--donor-time {self.donor_time}: give a minute at least")
        if self.min_nodes > self.nodes:
            raise UserError(f"--min-nodes {self.min_nodes} is more than --nodes {self.nodes}")

    @property
    def limit_seconds(self) -> int:
        return _seconds("--time", self.time)

    @property
    def limit(self) -> str:
        """Time limit as HH:MM:SS, with as many digits for hours as needed."""
        return _limit(self.limit_seconds)

    @property
    def donor_limit(self) -> str:
        """Time limit of a job that lends a node."""
        return _limit(_seconds("--donor-time", self.donor_time))

    @property
    def np(self) -> int:
        """World size of the job."""
        return total_slots(self.hosts) or self.nodes * self.ranks

    @property
    def container(self) -> str:
        """Image of a job that runs only in containers."""
        return self.image or f"hvdtrain:{__version__}"

    @property
    def run(self) -> str:
        """Run ID for targets without a number per job."""
        return self.run_id or self.name

    @property
    def run_directory(self) -> str:
        """Run directory, from the directory in which the job is submitted."""
        return f"{self.run_root}/{self.run_id}"


def _seconds(option: str, text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise UserError(f"{option} {text}: [DAYS-]HH:MM:SS is expected, such as 12:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _limit(limit_seconds: int) -> str:
    minutes, seconds = divmod(limit_seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


# Files of each target.

# File name -> text; a single file has its default name as key.
Files = dict[str, str]

# Directories of objects for kubectl apply -k: file -> template.
_COMMON = ("runs", "network", "disruption", "monitoring/kustomization", "monitoring/podmonitor")
_OBJECTS = {f"{name}.yaml": f"kubernetes/{name}.yaml" for name in _COMMON}
_KUBERNETES = _OBJECTS | {f"{n}.yaml": f"kubernetes/{n}.yaml" for n in ("kustomization", "job")}
_TRAINJOB = _OBJECTS | {
    f"{name}.yaml": f"trainjob/{name}.yaml" for name in ("kustomization", "runtime", "trainjob")
}


def _one_file(name: str, template: str, **more: object) -> Callable[[Job], Files]:
    def make(job: Job) -> Files:
        file = name if job.out is None else str(job.out)
        return {name: _render(template, job, file=file, **more)}

    return make


def _directory(templates: Mapping[str, str]) -> Callable[[Job], Files]:
    def make(job: Job) -> Files:
        files = {name: _render(template, job) for name, template in templates.items()}
        dashboard = resources.files("hvdtrain") / "deploy/dashboards/hvdtrain.json"
        return files | {"monitoring/hvdtrain.json": dashboard.read_text()}

    return make


def _malleable(job: Job) -> Files:
    if job.run_id is None:
        raise UserError("run.id is missing: donors find the run by it; add --run.id NAME after --")
    run, donor = (f"{job.out}/{name}" for name in (RUN_SCRIPT, DONOR_SCRIPT))
    return {
        RUN_SCRIPT: _render("slurm.sh", job, file=run, launcher="elastic"),
        DONOR_SCRIPT: _render("donor.sh", job, file=donor),
    }


# Scripts of a malleable run.
RUN_SCRIPT, DONOR_SCRIPT = "run.sbatch", "donor.sbatch"

TARGETS: dict[str, Callable[[Job], Files]] = {
    "slurm": _one_file("train.sbatch", "slurm.sh", launcher="srun"),
    "malleable": _malleable,
    "pbs": _one_file("train.pbs", "batch.sh", scheduler="pbs"),
    "lsf": _one_file("train.lsf", "batch.sh", scheduler="lsf"),
    "flux": _one_file("train.flux", "flux.sh"),
    "mpirun": _one_file("train.sh", "batch.sh", scheduler="none"),
    "compose": _one_file("compose.yaml", "compose.yaml"),
    "kubernetes": _directory(_KUBERNETES),
    "trainjob": _directory(_TRAINJOB),
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
    return environment.get_template(template).render(job=job, mpi=mpi, **more)


def _yaml(text: str) -> str:
    """Quote a string for YAML; JSON strings are valid YAML."""
    return json.dumps(text, ensure_ascii=False)


def _argument(text: str) -> str:
    """Quote a container argument for YAML; Kubernetes would replace $(NAME) in it."""
    return _yaml(text.replace("$(", "$$("))


def _dollars(text: str) -> str:
    """Escape $NAME, which Compose would replace."""
    return text.replace("$", "$$")
