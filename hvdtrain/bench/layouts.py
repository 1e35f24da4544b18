"""The losses of a model that spans ranks, on many layouts, against those of one rank."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.bench.jobs import RANK
from hvdtrain.bench.processes import BenchError, choose_hosts, finish, launch
from hvdtrain.bench.report import Figure, Report
from hvdtrain.parallel.config import AXES
from hvdtrain.run_files.folder import RunFolder

# Each is the ranks of the data axis, and keys of `parallel`.
LAYOUTS: Sequence[tuple[int, Mapping[str, Any]]] = (
    (2, {}),
    (2, {"zero": 1}),
    (4, {"zero": 1}),
    (1, {"tensor": 2}),
    (1, {"tensor": 4}),
    (1, {"shard": 2}),
    (1, {"shard": 4}),
    (1, {"context": 2}),
    (1, {"context": 4}),
    (1, {"pipeline": 2}),
    (1, {"pipeline": 4}),
    (1, {"pipeline": 2, "schedule": "gpipe"}),
    (1, {"pipeline": 2, "schedule": "interleaved1f1b"}),
    (1, {"pipeline": 2, "schedule": "zero-bubble"}),
    (2, {"tensor": 2}),
    (2, {"shard": 2}),
    (2, {"context": 2}),
    (2, {"pipeline": 2}),
    (1, {"shard": 2, "tensor": 2}),
    (1, {"context": 2, "tensor": 2}),
    (1, {"pipeline": 2, "tensor": 2}),
    (1, {"shard": 2, "context": 2}),
    (1, {"pipeline": 2, "context": 2}),
    (2, {"pipeline": 2, "tensor": 2}),
    (2, {"shard": 2, "tensor": 2}),
    (1, {"pipeline": 2, "context": 2, "tensor": 2}),
    (2, {"pipeline": 2, "context": 2, "tensor": 2}),
)
_QUIET = ("--checkpoint.every=0", "--telemetry.port=0", "--train.log_every=1")
_AIM = 1e-5  # of a loss; with parallel.zero not a bit differs


@dataclass(frozen=True)
class Where:
    """The ranks that there are.

    Args:
        most: of one layout; larger ones are left out.
        hosts: "name:slots,name:slots"; None: this host.
        root: a folder that all of them have; None: the system's for temporary files.
        launcher: gloo (horovodrun) or mpi (mpirun).
    """

    most: int
    hosts: str | None
    root: Path | None
    launcher: str


def layouts(flags: Sequence[str], steps: int, where: Where) -> Report:
    """Trains on each layout; one that fails is told as one that differs without bound.

    Raises:
        UserError: the hosts have too few slots.
    """
    flags = [*flags, f"--train.steps={steps}", *_QUIET]
    one = _train(flags, 1, where)
    unsharded = {ranks: _train(flags, ranks, where) for ranks in (2, 4) if ranks <= where.most}
    figures, failures = [], {}
    for replicas, keys in LAYOUTS:
        ranks = replicas * prod(keys.get(axis, 1) for axis in AXES)
        if ranks > where.most:
            continue
        own = [f"--parallel.{key}={value}" for key, value in keys.items()]
        name = " x ".join([f"data {replicas}", *(f"{key} {value}" for key, value in keys.items())])
        wanted, aim = (unsharded[ranks], 0.0) if "zero" in keys else (one, _AIM)
        try:
            found = _train([*flags, *own], ranks, where)
        except BenchError as error:
            failures[name] = str(error).splitlines()[-1]
            continue
        difference = _difference(found.losses, wanted.losses)
        figures.append(Figure(f"{name}: loss", "of it", [difference], at_most=aim))
        figures.append(Figure(f"{name}: step", "ms", [s * 1000 for s in found.seconds]))
    return Report("layouts", figures, {"steps": steps, "failed": failures or "none"})


def _difference(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest of a step, relative to the loss."""
    if len(losses) != len(wanted):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


class _Run(NamedTuple):
    losses: list[float]
    seconds: list[float]  # of each step


def _train(flags: Sequence[str], ranks: int, where: Where) -> _Run:
    """Raises BenchError: it failed."""
    command = [sys.executable, *RANK, *flags]
    with tempfile.TemporaryDirectory(dir=where.root) as root:
        command += [f"--run.root={root}", "--run.id=bench"]
        if ranks > 1:
            hosts = choose_hosts(where.hosts, ranks) if where.hosts else None
            command = launch(where.launcher, ranks, command, hosts)
        finish(command, threads=1)
        text = RunFolder(Path(root, "bench")).metrics.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return _Run([line["loss"] for line in lines], [line["step_seconds"] for line in lines])
