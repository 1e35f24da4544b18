"""Records of how a run was started: manifest.json, events.jsonl, hvdtrain_run_info."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hvdtrain.config import Config, Settings
from hvdtrain.data.loader import has_own_order
from hvdtrain.engine.state import PRECISION
from hvdtrain.horovod_wheel.recipe import installed_version
from hvdtrain.process.build import RunComponents
from hvdtrain.process.resolve import dataset_size
from hvdtrain.runtime.init import built_with, controller
from hvdtrain.runtime.mesh import Grid, Topology
from hvdtrain.tasks import Datasets
from hvdtrain.version import __version__


def run_facts(config: Config) -> dict[str, str]:
    """Return the labels of hvdtrain_run_info."""
    return {
        "task": config.task,
        "hvdtrain": __version__,
        "torch": torch.__version__,
    }


def build_manifest(
    settings: Settings,
    topology: Topology,
    device: torch.device,
    datasets: Datasets,
    starts: list[dict[str, Any]],
    grid: Grid,
) -> dict[str, Any]:
    """Return the content of RUN/manifest.json: versions, ranks, hosts, data and starts.

    Args:
        starts: one entry for each start of the run so far, this one last.
        grid: assigns shards of the model to ranks.
    """
    versions = {"hvdtrain": __version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in ("torch", "numpy")}
    versions |= {"horovod": installed_version("horovod") or "not installed"}
    return {
        "versions": versions,
        "task": settings.config.task,
        "world_size": topology.world_size,
        "hosts": topology.ranks_by_host(),
        **(_layout(topology, grid) if grid.replica_size > 1 else {}),
        "horovod": {"controller": controller(), "built": built_with()},
        "device": device.type,
        "threads_per_rank": torch.get_num_threads(),
        "git_commit": _git_commit(),
        "data_fingerprint": datasets.fingerprint,
        **({"data_format": datasets.format} if datasets.format else {}),
        "seed": settings.config.seed,
        "restarts": len(starts) - 1,
        "starts": starts,
    }


def _layout(topology: Topology, grid: Grid) -> dict[str, Any]:
    """Layout of the ranks as text, and the coordinates of each rank."""
    return {
        "layout": grid.describe(topology.hosts).splitlines(),
        "coordinates": [grid.coordinates(rank) for rank in range(topology.world_size)],
    }


def start_facts(components: RunComponents, topology: Topology) -> dict[str, Any]:
    """Return the start event of a generation in RUN/events.jsonl: first step, ranks and data."""
    config, state, datasets = components.config, components.state, components.datasets
    order = components.prepared.resolved.order
    buckets = components.buckets.train
    samples = components.prepared.samples
    return {
        "step": state.progress.step,
        "samples": state.progress.samples,
        "applied": state.applied.count,
        **({"rollbacks": state.progress.rollbacks} if state.progress.rollbacks else {}),
        "world_size": topology.world_size,
        "hosts": topology.ranks_by_host(),
        "global_size": config.batch.global_size,
        "micro_size": config.batch.micro_samples,
        **({"order": order} if order is not None and order.keys() != {"size"} else {}),
        **({"per_step": config.batch.per_step, "buckets": buckets.sizes} if buckets else {}),
        "seed": config.seed,
        "dataset_size": dataset_size(datasets),
        "own_order": has_own_order(datasets.train),
        **_data_position(components),
        "precision": state.identity[PRECISION],
        "depends_on_ranks": config.depends_on_ranks,
        "sync_every": config.exchange.sync_every,
        "fingerprint": datasets.fingerprint,
        **({"samples_compared": len(samples.fixed)} if samples is not None else {}),
        "total_steps": config.train.steps,
        "log_every": config.train.log_every,
    }


def _data_position(components: RunComponents) -> dict[str, Any]:
    """Where a dataset with a state of its own begins: completed passes, samples of the next one."""
    stream, samples = components.prepared.stream, components.state.progress.samples
    if stream is None:
        return {}
    position = stream.position
    if (position.samples if position else 0) != samples:
        return {"data_position": None}  # unknown: a checkpoint of an older version
    return {"data_position": [position.epoch, position.read] if position else [0, 0]}


@cache
def _git_commit() -> str | None:
    """Commit of the working directory (the user's own code); None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, cwd=Path.cwd()
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
