"""`hvdtrain plan`: predict the cost of a run on a cluster before the cluster exists."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.commands.arguments import at_least, positive_number
from hvdtrain.commands.output import check_plot
from hvdtrain.errors import UserError
from hvdtrain.files import write_atomic

if TYPE_CHECKING:
    from hvdtrain.plan.cluster import Cluster
    from hvdtrain.plan.job import JobProfile
    from hvdtrain.plan.result import PlanResult, Terms
    from hvdtrain.plan.sources import Found


_GIB = float(1 << 30)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("job")
    source.add_argument(
        "--measure", action="store_true", help="measure a step on this host, in about a minute"
    )
    source.add_argument(
        "--from",
        dest="sources",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="a run directory, or output of `bench exchange`, `bench allreduce` or `plan` "
        "with --format json; may be given several times",
    )
    source.add_argument(
        "--gpu",
        metavar="NAME",
        help="compute the step from the model's FLOPs and this GPU's peak, such as H100",
    )
    source.add_argument(
        "--mfu",
        type=_fraction,
        default=0.4,
        help="fraction of the peak that is achieved (default: %(default)s)",
    )
    source.add_argument(
        "--weak",
        action="store_true",
        help="weak scaling: global batch proportional to ranks (default: constant)",
    )
    _add_cluster(parser.add_argument_group("cluster"))
    parser.add_argument(
        "--strategies", metavar="dense,float16", help="exchange strategies (default: all known)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.html", help="draw efficiency over ranks")
    parser.add_argument(
        "--tune", action="store_true", help="print settings as YAML, from --from ALLREDUCE.json"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument(
        "flags", nargs="*", metavar="-- --key value", help="keys of the configuration"
    )


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    count: dict[str, Any] = {"type": at_least(1), "metavar": "N", "default": 1}
    group.add_argument("--hosts", **count, help="maximum number of hosts (default: %(default)s)")
    group.add_argument("--ranks", **count, help="ranks per host (default: %(default)s)")
    group.add_argument(
        "--bandwidth",
        metavar="25gbit",
        help="bandwidth of a host's link (default: 10gbit, or as measured)",
    )
    group.add_argument(
        "--latency",
        default="30us",
        metavar="30us",
        help="latency of that link (default: %(default)s)",
    )
    group.add_argument(
        "--inside",
        default="100gbit",
        metavar="100gbit",
        help="bandwidth between two ranks of a host (default: %(default)s)",
    )
    group.add_argument(
        "--algorithm",
        choices=("ring", "hierarchical", "best"),
        default="ring",
        help="all-reduce algorithm: ring (Gloo), hierarchical (exchange.hierarchical), best (NCCL, "
        "MPI: by size) (default: %(default)s)",
    )
    group.add_argument("--memory", type=positive_number, metavar="GIB", help="memory per rank")
    group.add_argument(
        "--mtbf", type=positive_number, metavar="HOURS", help="mean time between failures of a host"
    )
    group.add_argument(
        "--price", type=positive_number, metavar="NUMBER", help="price of a host per hour"
    )


def _fraction(text: str) -> float:
    if (value := positive_number(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def run(args: argparse.Namespace) -> int:
    from hvdtrain.plan import sources

    if args.plot is not None:
        check_plot(args.plot)  # before measuring, which takes a minute
    found = [sources.read(path) for path in args.sources]
    plan = _plan(args, found)
    if args.tune:
        return _tune(found, plan)
    if plan is None:
        raise UserError("no job is given: --measure, --gpu NAME, or --from RUN or FILE.json")
    if args.plot is not None:
        from hvdtrain.plan.report import efficiency
        from hvdtrain.report import html

        write_atomic(args.plot, html.of_chart("hvdtrain plan", efficiency(plan)).encode())
    if args.format == "json":
        print(json.dumps(plan.to_dict(), indent=1))
        return 0
    from rich.console import Console

    from hvdtrain.plan.report import show

    # In a file or a pipe, the table gets a fixed width.
    show(plan, Console(width=None if sys.stdout.isatty() else 120))
    return 0


def _plan(args: argparse.Namespace, found: list[Found]) -> PlanResult | None:
    from hvdtrain.plan.result import make_plan

    job, of_job = _job(args, found)
    if job is None:
        return None
    cluster, of_cluster = _cluster(args, found)
    return make_plan(job, cluster, _terms(args, found, job), of_job, of_cluster)


def _job(args: argparse.Namespace, found: list[Found]) -> tuple[JobProfile | None, list[str]]:
    """Return the job and a list of what is unknown about it."""
    described = [one for one in found if one.job is not None]
    given = [args.measure, args.gpu is not None, *(True for _ in described)]
    if sum(given) > 1:
        raise UserError("give one job: --measure, --gpu, or one --from that contains a job")
    if args.measure:
        from hvdtrain.plan.measure import measure_job

        return measure_job(args.flags, _at_once(args.ranks)), []
    if args.gpu is not None:
        from hvdtrain.plan.described import described_job

        return described_job(args.flags, args.gpu, args.mfu), [
            f"the fraction of the peak that this model reaches: {args.mfu:g} is assumed (--mfu)",
            "when each gradient is ready: assumed even over the backward pass",
            "activations in 16 bits: counted as float32",
        ]
    if args.flags:
        raise UserError("keys of the configuration require --measure or --gpu")
    return (described[0].job, list(described[0].unknown)) if described else (None, [])


def _at_once(ranks: int) -> int:
    """Number of processes to measure at the same time: on a GPU, one."""
    import torch

    from hvdtrain.runtime.machine import cores

    return 1 if torch.cuda.is_available() else min(ranks, cores())


def _cluster(args: argparse.Namespace, found: list[Found]) -> tuple[Cluster, list[str]]:
    """Return the cluster and a list of what is unknown about it."""
    from hvdtrain.plan.cluster import TCP_PAYLOAD, Cluster, Link, parse_bandwidth, parse_seconds

    measured = next((one.link for one in found if one.link is not None), None)
    assumed = []
    latency = parse_seconds(args.latency)
    launch = busy = beside = 0.0
    bits, payload = parse_bandwidth(args.bandwidth or "10gbit"), TCP_PAYLOAD
    if measured is not None:
        if measured.several and args.bandwidth is None:
            bits, payload = measured.bits_per_second, 1.0
        elif not measured.several:
            busy = measured.seconds_per_byte * measured.ranks / (2 * (measured.ranks - 1))
    elif args.measure and _on_cpus():
        from hvdtrain.plan.measure import measure_costs

        costs = measure_costs()
        launch, busy = costs.launch_seconds, costs.busy_seconds_per_byte
        beside = costs.contention_seconds
    else:
        assumed.append(
            "start-up time and processor time of collectives: 0 is assumed; give --from "
            "ALLREDUCE.json (`hvdtrain bench allreduce --format json`)"
        )
    if measured is None or not measured.several:
        assumed.append(f"the real network: {bits / 1e9:g} Gbit/s and {args.latency} are assumed")
    if args.ranks > 1:
        assumed.append(f"links within a host: {args.inside} (--inside)")
    within = Link(parse_bandwidth(args.inside))
    between = Link(bits, latency, payload)
    cluster = Cluster(args.hosts, args.ranks, between, within, args.algorithm, launch, busy, beside)
    if measured is not None:
        cluster = replace(cluster, launch_seconds=measured.launch_seconds(cluster))
    return cluster, assumed


def _on_cpus() -> bool:
    import torch

    return not torch.cuda.is_available()


def _terms(args: argparse.Namespace, found: list[Found], job: JobProfile) -> Terms:
    from hvdtrain.config import parse
    from hvdtrain.plan.result import Terms

    exchange = parse(args.flags).config.exchange
    saves = [one.save_seconds for one in found if one.save_seconds is not None]
    names = list(job.costs)
    if args.strategies:
        names = [name.strip() for name in args.strategies.split(",")]
        for name in names:
            if name not in job.costs:
                raise UserError(f"--strategies: {name} is not one of {', '.join(job.costs)}")
    return Terms(
        exchange=exchange,
        strategies=list(dict.fromkeys(names)),
        memory_bytes=args.memory and args.memory * _GIB,
        mtbf=args.mtbf * 3600 if args.mtbf else inf,
        price=args.price,
        save_seconds=saves[0] if saves else None,
        weak=args.weak,
    )


def _tune(found: list[Found], plan: PlanResult | None) -> int:
    from hvdtrain.plan.report import tune

    links = [one.link for one in found if one.link is not None]
    if not links:
        raise UserError(
            "--tune needs --from ALLREDUCE.json: hvdtrain bench allreduce --hosts ... --format json"
        )
    print(tune(links[0], plan), end="")
    return 0
