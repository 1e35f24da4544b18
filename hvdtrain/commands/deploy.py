"""`hvdtrain deploy TARGET`: write the files that start a job on a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hvdtrain.commands.arguments import at_least
from hvdtrain.commands.output import write_out

_BATCH = ("nodes", "ranks", "cpus", "gpus", "time", "queue", "module", "venv", "image")
_OBJECTS = (
    *("nodes", "ranks", "cpus", "gpus", "image", "gpu-image", "min-nodes"),
    *("memory", "storage", "storage-class", "monitoring"),
)
_DIRECTORIES = ("malleable", "kubernetes", "trainjob")  # targets of several files
# target -> (help line, options in addition to the common ones)
_TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "slurm": ("a script for sbatch, requeued until the run has ended", _BATCH),
    "malleable": (
        "a script for sbatch that holds an elastic run, and one that lends it idle nodes",
        (*_BATCH, "donor-time", "donor-queue"),
    ),
    "pbs": ("a script for qsub, submitted again until the run has ended", _BATCH),
    "lsf": ("a script for bsub, requeued until the run has ended", _BATCH),
    "flux": ("an elastic script for flux batch, submitted again until the run has ended", _BATCH),
    "mpirun": ("a script for hosts without a batch system", ("hosts", "module", "venv", "image")),
    "compose": (
        "training nodes in containers of one machine",
        ("nodes", "ranks", "cpus", "gpus", "image", "gpu-image"),
    ),
    "kubernetes": (
        "an elastic Job with its volume and network policy, for kubectl apply -k",
        _OBJECTS,
    ),
    "trainjob": (
        "the same as a TrainJob of Kubeflow Trainer 2, for kubectl apply -k",
        _OBJECTS,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    for target, (line, options) in _TARGETS.items():
        own = targets.add_parser(target, help=line, description=f"{line[0].upper()}{line[1:]}.")
        for option in ("name", *options, "grace"):
            own.add_argument(f"--{option}", default=argparse.SUPPRESS, **_options()[option])
        what = "DIRECTORY" if target in _DIRECTORIES else "FILE"
        otherwise = target if target in _DIRECTORIES else "stdout"
        own.add_argument(
            "--out", type=Path, metavar=what, help=f"output path (default: {otherwise})"
        )
        own.add_argument(
            "training",
            nargs=argparse.REMAINDER,
            metavar="-- --key value",
            help="keys of the configuration",
        )
        own.usage = f"{own.prog} [options] [-- --key value ...]"


def _options() -> dict[str, dict[str, Any]]:
    """Option -> its argparse arguments; the defaults are in `Job`."""
    count: dict[str, Any] = {"type": at_least(1), "metavar": "N"}
    return {
        "name": {"metavar": "NAME", "help": "name of the job (default: hvdtrain)"},
        "nodes": count | {"help": "number of nodes (default: 2; malleable: 1)"},
        "ranks": count | {"help": "ranks per node (default: 8)"},
        "cpus": count | {"help": "CPUs per rank (default: the cluster's default)"},
        "gpus": {"action": "store_true", "help": "request one GPU per rank"},
        "time": {"metavar": "[D-]HH:MM:SS", "help": "time limit of the job (default: 01:00:00)"},
        "queue": {"metavar": "NAME", "help": "queue or partition (default: the cluster's default)"},
        "donor-time": {
            "metavar": "[D-]HH:MM:SS",
            "help": "time limit of a job that lends a node (default: 00:20:00)",
        },
        "donor-queue": {
            "metavar": "NAME",
            "help": "partition of jobs that lend nodes (default: the cluster's default)",
        },
        "module": {
            "action": "append",
            "dest": "modules",
            "metavar": "NAME",
            "help": "a module to load; may be given several times",
        },
        "venv": {"metavar": "DIRECTORY", "help": "environment with hvdtrain (default: this one)"},
        "image": {
            "metavar": "IMAGE",
            "help": "container image with hvdtrain: for a batch system an Apptainer image, instead "
            "of --venv; otherwise a Docker image (default: hvdtrain:VERSION)",
        },
        "gpu-image": {
            "metavar": "IMAGE",
            "help": "Docker image with CUDA (default: hvdtrain:cuda)",
        },
        "hosts": {"required": True, "metavar": "LIST", "help": "such as node1:8,node2:8"},
        "min-nodes": count | {"help": "minimum size of an elastic job (default: 1)"},
        "memory": count | {"help": "memory per node in GiB (default: 16)"},
        "storage": count | {"help": "size of the volume for runs in GiB (default: 100)"},
        "storage-class": {
            "metavar": "NAME",
            "help": "storage class of the volume for runs (ReadWriteMany)",
        },
        "monitoring": {
            "metavar": "NAMESPACE",
            "help": "namespace of Prometheus, which may read the metrics (default: monitoring)",
        },
        "grace": count | {"help": "seconds for a last checkpoint (default: 120)"},
    }


def _own_environment() -> str:
    """The virtual environment of this process; .venv if there is none."""
    return sys.prefix if sys.prefix != sys.base_prefix else ".venv"


def _without_run_id(keys: Sequence[str]) -> tuple[str, ...]:
    """The keys without run.id, which each template writes itself."""
    words, kept = iter(keys), []
    for word in words:
        if word == "--run.id":
            next(words)
        elif not word.startswith("--run.id="):
            kept.append(word)
    return tuple(kept)


def run(args: argparse.Namespace) -> int:
    from hvdtrain.config import parse
    from hvdtrain.deploy.job import TARGETS, Job
    from hvdtrain.launch.hostfile import parse_hosts

    keys = args.training[1:] if args.training[:1] == ["--"] else args.training
    if args.target in _DIRECTORIES and args.out is None:
        args.out = Path(args.target)
    given = {f.name: getattr(args, f.name) for f in fields(Job) if hasattr(args, f.name)}
    given["modules"] = tuple(given.get("modules", ()))
    given["hosts"] = tuple(parse_hosts(args.hosts)) if "hosts" in given else ()
    given.setdefault("venv", _own_environment())
    if args.target == "malleable":
        given.setdefault("nodes", 1)
    run = parse(keys).config.run
    job = Job(**given, keys=_without_run_id(keys), run_id=run.id, run_root=str(run.root))
    files = TARGETS[args.target](job)
    if job.out is None:
        print(*files.values(), sep="", end="")
    elif args.target in _DIRECTORIES:
        for name, text in files.items():
            write_out(job.out / name, text, make_directory=True)
        print(job.out)
    else:
        (text,) = files.values()
        write_out(job.out, text, make_directory=True)
        print(job.out)
    return 0
