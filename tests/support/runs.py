"""Runs of the app on this machine, started as users start them, with a timeout for every wait."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.launch.commands import horovodrun, mpirun
from tests.support import warm
from tests.support.job import Finished, Job

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = [sys.executable, "-m", "hvdtrain.train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# A text that always exists and is large enough for some epochs of a tiny model.
CORPUS = REPOSITORY / "LICENSE"
TINY = [
    *("--model.layers", "1", "--model.width", "32", "--model.heads", "2"),
    *("--model.context", "32", "--data.train", str(CORPUS)),
    *("--batch.global_size", "8", "--batch.micro_size", "2"),
    *("--eval.every", "0", "--telemetry.port", "0"),
]
_LAUNCHERS = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "PRTE_", "TORCHELASTIC_")


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without a launcher, with one thread per rank and no GPU.

    Runs are compared bitwise, so their ranks must use the same threads and devices.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    env["OMPI_MCA_mpi_yield_when_idle"] = "1"  # a waiting rank yields its core to other ranks
    return env | dict(more or {})


def start(
    directory: Path,
    arguments: Sequence[str],
    launcher: str = "",
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = TRAIN,
) -> Job:
    """Start a run.

    Args:
        directory: for the output.
        arguments: flags of the command.
        launcher: "" (none), or "mpirun:N", "gloo:N" (horovodrun), "torchrun:N" for N ranks; after
            a second colon, more flags of torchrun.
        env: in addition to `environment()`.
        command: command of each rank.
    """
    directory.mkdir(parents=True, exist_ok=True)
    argv = [*command, *arguments]
    name, ranks, *more = [*launcher.split(":", 2), ""][:3]
    if name == "torchrun":
        argv = [
            *TORCHRUN,
            "--standalone",
            "--nproc-per-node",
            ranks,
            *" ".join(more).split(),
            "--no-python",
            *argv,
        ]
    elif name == "mpirun":
        argv = mpirun(int(ranks), argv)
    elif name:
        argv = horovodrun(int(ranks), argv, controller=name)
    number = len(list(directory.glob("job-*.stdout")))
    return Job([], argv, environment(env), directory / f"job-{number}")


def run(
    directory: Path,
    arguments: Sequence[str],
    launcher: str = "",
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> Finished:
    """Run to the end; AssertionError with the output after `timeout` seconds.

    The ranks are forked, see warm.py; `start` starts them as users do.
    """
    command = forked_train(int([*launcher.split(":"), "1"][1]))
    return start(directory, arguments, launcher, env, command).wait(timeout)


def forked_train(ranks: int, preload: str = "") -> list[str]:
    """`TRAIN` with ranks that are forked: see warm.py."""
    return [warm.python(ranks, preload), *TRAIN[1:]]


def train(
    root: Path, run_id: str, arguments: Sequence[str], launcher: str = "", timeout: float = 120
) -> Path:
    """Run with `TINY`, which must exit with 0; return the run directory."""
    where = ["--run.root", str(root), "--run.id", run_id]
    done = run(root / "output", [*TINY, *where, *arguments], launcher, timeout=timeout)
    assert done.returncode == 0, done
    return root / run_id


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl so far; none if there is no file.

    A run that trains may be writing the last line: it is left out until its end is there.
    """
    path = directory / "metrics.jsonl"
    whole = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in whole]


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in metrics(directory)]


def weights(directory: Path, step: int, files: int = 2) -> dict[str, str]:
    """Return file -> sha256 of the `files` tensor files in a step's checkpoint."""
    paths = sorted((directory / f"checkpoints/step_{step:08}").glob("*.safetensors"))
    assert len(paths) == files, f"no checkpoint of step {step} in {directory}"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
