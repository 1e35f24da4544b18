"""Inputs of a plan: a run, or the JSON of `hvdtrain bench` and of `hvdtrain plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.plan.cluster import Cluster, all_reduce
from hvdtrain.plan.job import BACKWARD_SHARE, JobProfile, even_buckets, evenly_ready, free_wires
from hvdtrain.plan.measure import job_from
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.untrusted import parse_json, read_regular


@dataclass(frozen=True)
class MeasuredLink:
    """Measurements of a cluster's all-reduces.

    Args:
        ranks: number of ranks that took part.
        hosts: number of their hosts; with one host, the network was not measured.
        shortest_seconds: time of the smallest buffer, with all its hops.
        seconds_per_byte: per byte of the buffer, from the smallest and the largest buffer.
        sides: name -> bytes -> seconds.
    """

    ranks: int
    hosts: int
    shortest_seconds: float
    seconds_per_byte: float
    sides: dict[str, dict[int, float]]

    @property
    def several(self) -> bool:
        return self.hosts > 1

    def launch_seconds(self, cluster: Cluster) -> float:
        """Time of the smallest buffer without its hops, whose latency `cluster` gives.

        Not below 0: the given latency may exceed the measured time.
        """
        per_host = max(1, self.ranks // self.hosts)
        hops = all_reduce(0.0, replace(cluster, hosts=self.hosts, ranks_per_host=per_host))
        return max(0.0, self.shortest_seconds - hops)

    @property
    def bits_per_second(self) -> float:
        """Bandwidth of the link that a ring of these ranks would need, with all its costs."""
        return 8 * 2 * (self.ranks - 1) / self.ranks / self.seconds_per_byte


@dataclass(frozen=True)
class Found:
    """Contents of one source.

    Args:
        job, link: None if the source does not contain them.
        save_seconds: time by which a checkpoint stalled the steps; None: unknown.
        unknown: sentences on what was assumed.
    """

    job: JobProfile | None = None
    link: MeasuredLink | None = None
    save_seconds: float | None = None
    unknown: Sequence[str] = field(default_factory=tuple)


def read(path: Path) -> Found:
    """Read a run directory or a JSON file.

    Raises:
        UserError: it is neither, or a plan cannot start from it.
    """
    if path.is_dir():
        return _of_run(path)
    try:
        content = parse_json(read_regular(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--from {path} cannot be read: {error}") from None
    except ValueError:
        content = None
    kind = content.get("benchmark") if isinstance(content, dict) else None
    readers = {"allreduce": _of_allreduce, "exchange": _of_exchange, "plan": _of_plan}
    if kind not in readers:
        raise UserError(
            f"--from {path}: not a run directory, nor the JSON output of `hvdtrain bench "
            "exchange`, `hvdtrain bench allreduce` or `hvdtrain plan` (--format json)"
        )
    try:
        return readers[kind](content)
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise UserError(
            f"--from {path}: not the format of `{kind}` ({type(error).__name__}: {error}); "
            "measure again"
        ) from None


def _of_plan(content: dict[str, Any]) -> Found:
    unknown = content.get("unknown_of_the_job", ())
    return Found(job=job_from(content["job"]), unknown=tuple(unknown))


def _of_allreduce(content: dict[str, Any]) -> Found:
    sides: dict[str, dict[int, float]] = {}
    for row in content["rows"]:
        sides.setdefault(row["side"], {})[int(row["bytes"])] = float(row["seconds"])
    own = {name: by_size for name, by_size in sides.items() if name.startswith("Horovod")}
    sizes = sorted({size for by_size in own.values() for size in by_size})
    if len(sizes) < 2:
        raise UserError(
            "--from: Horovod's all-reduces of at least two sizes are required, one of them at "
            "least 1M; measure again: hvdtrain bench allreduce --sizes 1K,8M --format json"
        )
    best = min(own.values(), key=lambda by_size: by_size[sizes[-1]])
    slope = (best[sizes[-1]] - best[sizes[0]]) / (sizes[-1] - sizes[0])
    link = MeasuredLink(
        ranks=int(content["ranks"]),
        hosts=len(content["hosts"].split(",")),
        shortest_seconds=best[sizes[0]],
        seconds_per_byte=max(slope, 1e-15),
        sides=sides,
    )
    return Found(link=link)


def _of_exchange(content: dict[str, Any]) -> Found:
    rows = {row["side"]: row for row in content["rows"]}
    seconds, ranks = rows["no exchange"]["step_seconds"], int(content["ranks"])
    sent = next(rows[name]["sent_bytes"] for name in ("dense", "local_sgd") if name in rows)
    job = JobProfile(
        forward_seconds=seconds * (1 - BACKWARD_SHARE),
        backward_seconds=seconds * BACKWARD_SHARE,
        optimizer_seconds=0.0,
        other_seconds=0.0,
        micro_batches=ranks,
        micro_size=1,
        buckets=even_buckets(int(sent) // 4),
        costs=free_wires(),
        optimizer_bytes=2.0 * sent,
    )
    unknown = (
        "how a step is divided: assumed are two thirds for the backward pass, one micro-batch per "
        "rank, and one sample per micro-batch",
        "powersgd and topk: `hvdtrain bench exchange` does not measure their arithmetic separately",
        "optimizer state: AdamW's is assumed",
    )
    return Found(job=job, unknown=unknown)


def _of_run(path: Path) -> Found:
    from hvdtrain.process.data import build_data
    from hvdtrain.report.metrics import run_metrics
    from hvdtrain.report.run import read as read_run

    run = read_run(path)
    found, ranks = run_metrics(run), run.ranks
    seconds = found["phase_seconds_per_step"]
    if ranks is None or seconds is None or not run.config:
        raise UserError(
            f"--from {path}: it has no ranks.jsonl or config.yaml; train some tens of "
            "steps (telemetry.exchange_every)"
        )
    if found["layout"] or run.config.get("parallel", {}).get("shard", {}).get("stage") == 1:
        raise UserError(f"--from {path}: its model spans ranks; plan from a run with whole models")
    batch = run.config["batch"]
    if batch.get("max_tokens") or batch.get("per_rank_size") or batch["micro_size"] == "auto":
        raise UserError(
            f"--from {path}: batch.max_tokens, batch.per_rank_size and batch.micro_size auto are "
            "not supported"
        )
    micro_batches = max(1, batch["global_size"] // batch["micro_size"])
    world = int(ranks.world_size[-1])
    passes = ceil(micro_batches / world)
    # Load the data too, because it determines sizes such as the vocabulary.
    task, _ = build_data(parse(["--config", str(RunDirectory(path).config)]))
    model = task.model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    alone = world == 1
    job = JobProfile(
        forward_seconds=(seconds["data"] + seconds["forward"]) / passes,
        backward_seconds=seconds["backward"] / passes,
        optimizer_seconds=seconds["optimizer"],
        other_seconds=seconds["other"] + (seconds["comm_exposed"] if alone else 0.0),
        micro_batches=micro_batches,
        micro_size=batch["micro_size"],
        buckets=evenly_ready(parameters),
        costs=free_wires(),
        element_bytes=parameters[0].element_size(),
        optimizer_bytes=2.0 * sum(p.nbytes for p in parameters),
    )
    unknown = [
        "when each gradient is ready: assumed even over the backward pass",
        "powersgd and topk: their arithmetic requires a measurement (--measure)",
        "optimizer state: AdamW's is assumed; activations are not recorded in a run",
    ]
    if not alone:
        unknown.append(
            f"the cost of gradient synchronization during the backward pass of the run's {world} "
            f"ranks: it is included in their times"
        )
    stalls = [s for g in run.ledger.generations for s in g.stalls.values()] if run.ledger else []
    return Found(job, save_seconds=median(stalls) if stalls else None, unknown=unknown)
