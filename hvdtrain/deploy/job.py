"""What a deployed job looks like, wherever it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import hvdtrain
from hvdtrain.errors import UserError
from hvdtrain.launch.hostfile import Host

# A label of Kubernetes and of DNS: the names of hosts are made of it. Of at most 40 characters,
# as programs add to it; PBS takes no more than 15, and says so itself.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_NO_NAMES = ("false", "n", "no", "null", "off", "on", "true", "y", "yes")  # to YAML
_TIME = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
_WORD = re.compile(r"[\w./:@+=,-]+")
# So much earlier than asked for Slurm's signal may come.
_SHORTEST_LIMIT = 60


@dataclass(frozen=True)
class Job:
    """A job, as the templates read it.

    Args:
        keys: the configuration's keys, as flags
        run_id: of `keys`, where it is among them
        name: of the job
        nodes: how many
        ranks: of a node
        cpus: of a rank; None: the cluster's own default
        gpus: a rank has one
        grace: seconds that the ranks have for a last checkpoint
        time: limit of the job, [D-]HH:MM:SS
        queue: a partition of Slurm, a queue of PBS or LSF; None: the default one
        modules: environment modules to load
        venv: the environment that has hvdtrain
        image: a container that has hvdtrain
        gpu_image: the same with CUDA
        hosts: where mpirun starts ranks
        min_nodes: with fewer an elastic job waits
        max_nodes: more an elastic job does not use
        memory: of a node, in GiB
        storage: for runs, in GiB
        storage_class: of the volume for runs; None: the cluster's default
        monitoring: the namespace of Prometheus
        out: where the files go; None: the standard output

    Raises:
        UserError: a value that no cluster takes, or that does not go with another.
    """

    keys: tuple[str, ...] = ()
    run_id: str | None = None
    name: str = "hvdtrain"
    nodes: int = 2
    ranks: int = 8
    cpus: int | None = None
    gpus: bool = False
    grace: int = 120
    time: str = "01:00:00"
    queue: str | None = None
    modules: tuple[str, ...] = ()
    venv: str = ".venv"
    image: str | None = None
    gpu_image: str = "hvdtrain:cuda"
    hosts: tuple[Host, ...] = field(default=())
    min_nodes: int = 1
    max_nodes: int | None = None
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
            "run.id": self.run_id,
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
                raise UserError(f"{option}: {word!r} is no name or path without spaces")
        if self.limit_seconds < self.grace + _SHORTEST_LIMIT:
            raise UserError(
                f"--time {self.time} leaves less than a minute before the {self.grace} s of "
                "--grace: give more time, or a shorter grace"
            )
        if not self.min_nodes <= self.nodes <= self.most_nodes:
            raise UserError(
                f"--nodes {self.nodes} must lie between --min-nodes {self.min_nodes} and "
                f"--max-nodes {self.most_nodes}"
            )

    @property
    def most_nodes(self) -> int:
        return self.nodes if self.max_nodes is None else self.max_nodes

    @property
    def limit_seconds(self) -> int:
        match = _TIME.fullmatch(self.time)
        if match is None:
            raise UserError(f"--time {self.time}: [DAYS-]HH:MM:SS is expected, such as 12:00:00")
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def limit(self) -> str:
        """HH:MM:SS, with as many hours as it takes."""
        minutes, seconds = divmod(self.limit_seconds, 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"

    @property
    def np(self) -> int:
        """All ranks."""
        return sum(host.slots for host in self.hosts) or self.nodes * self.ranks

    @property
    def container(self) -> str:
        """The image of a job that runs in containers alone."""
        return self.image or f"hvdtrain:{hvdtrain.__version__}"

    @property
    def run(self) -> str:
        """The run's id, where a job has no number of its own."""
        return self.run_id or self.name
