"""`hvdtrain bench overhead | scaling | allreduce | exchange | memory | checkpoint | ...`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.commands.arguments import at_least
from hvdtrain.commands.output import check_plot
from hvdtrain.errors import UserError
from hvdtrain.files import write_atomic

if TYPE_CHECKING:
    from hvdtrain.bench.allreduce import AllreduceReport
    from hvdtrain.bench.exchange import ExchangeReport
    from hvdtrain.bench.report import Report


# name -> (help, default preset, default steps, default rounds)
_ACTIONS = {
    "overhead": ("step time of hvdtrain compared with a plain PyTorch loop", "gpt-nano", 2, 30),
    "scaling": (
        "throughput of several ranks compared with 1 rank, and with torch's DDP",
        "gpt-nano",
        20,
        3,
    ),
    "memory": ("memory of a rank compared with a plain PyTorch loop", "gpt-nano", 5, 1),
    "checkpoint": (
        "step-time overhead of a save and of copies in memory, time of the restore",
        "gpt-small",
        50,
        2,
    ),
    "elastic": (
        "2 ranks of an elastic job compared with 2 ranks of a non-elastic job",
        "gpt-nano",
        4,
        100,
    ),
    "recovery": ("pause after kill -9 of a rank of an elastic job", "gpt-nano", 10, 3),
}
_SIZES = "1K,4K,16K,64K,256K,1M,4M,16M,32M,64M,256M"
# Only the state size matters, not the batch; shorter steps increase the stall's share.
_FLAGS = {
    "checkpoint": ("--batch.global_size=1", "--batch.micro_size=1", "--model.context=64"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (line, preset, steps, rounds) in _ACTIONS.items():
        action = actions.add_parser(
            name,
            help=line,
            description=f"{line}. The variants alternate; ratios compare adjacent runs, so that "
            "other programs on the machine affect all variants equally.",
        )
        action.add_argument(
            "--preset", default=preset, help="preset or YAML file (default: %(default)s)"
        )
        action.add_argument(
            "--steps", type=at_least(1), default=steps, help="steps per turn (default: %(default)s)"
        )
        action.add_argument(
            "--rounds", type=at_least(1), default=rounds, help="turns (default: %(default)s)"
        )
        if name == "recovery":
            action.add_argument(
                "--np", type=at_least(2), default=2, help="ranks (default: %(default)s)"
            )
            action.add_argument(
                "--hosts",
                metavar="A:8,B:8",
                help="default: this host; run.root must be shared by all hosts",
            )
        if name == "scaling":
            _add_scale(action)
        _add_format(action)
        _add_flags(action)
    _add_allreduce(actions)
    _add_exchange(actions)


def _add_scale(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--np", type=_world_sizes, default=[2], metavar="2,4", help="ranks (default: 2)"
    )
    action.add_argument("--hosts", metavar="A:2,B:2", help="default: this host")
    action.add_argument(
        "--weak",
        action="store_true",
        help="weak scaling: global batch proportional to ranks (default: constant)",
    )


def _add_allreduce(actions: Any) -> None:
    line = "all-reduces of each size: Horovod, raw MPI, torch's gloo"
    action = actions.add_parser(
        "allreduce",
        help=line,
        description=f"{line}. Each runs in separate ranks, with the settings of a run; they take "
        "turns. Algorithm and bus bandwidth are defined as in nccl-tests.",
    )
    action.add_argument("--np", type=at_least(2), default=2, help="ranks (default: %(default)s)")
    action.add_argument("--hosts", metavar="A:1,B:1", help="default: this host")
    action.add_argument(
        "--sizes", default=_SIZES, help="bytes of float32 values (default: %(default)s)"
    )
    action.add_argument(
        "--rounds", type=at_least(1), default=3, help="turns (default: %(default)s)"
    )
    action.add_argument("--plot", type=Path, metavar="FILE.html", help="also plot bus bandwidths")
    _add_format(action)


def _add_exchange(actions: Any) -> None:
    line = "gradient synchronization strategies: step time, bytes, and losses"
    action = actions.add_parser(
        "exchange",
        help=line,
        description=f"{line}. Each is a separate run; they alternate with a baseline without "
        "communication. The first 10 steps are excluded from time and bytes.",
    )
    action.add_argument(
        "--preset", default="gpt-nano", help="preset or YAML file (default: %(default)s)"
    )
    action.add_argument("--np", type=at_least(2), default=2, help="ranks (default: %(default)s)")
    action.add_argument(
        "--hosts",
        metavar="A:1,B:1",
        help="default: this host; run.root must be shared by all hosts",
    )
    action.add_argument("--launcher", choices=("gloo", "mpi"), default="gloo")
    action.add_argument("--strategies", metavar="dense,topk", help="default: all")
    action.add_argument(
        "--steps", type=at_least(1), default=100, help="steps per run (default: %(default)s)"
    )
    action.add_argument(
        "--rounds", type=at_least(1), default=1, help="turns (default: %(default)s)"
    )
    action.add_argument("--plot", type=Path, metavar="FILE.html", help="also plot losses over time")
    _add_format(action)
    _add_flags(action)


def _add_flags(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "flags", nargs="*", metavar="-- --key value", help="keys of the configuration"
    )


def _add_format(action: argparse.ArgumentParser) -> None:
    action.add_argument("--format", choices=("table", "json"), default="table")


def _world_sizes(text: str) -> list[int]:
    """Parse world sizes. World size 1 is always measured, so naming it is optional."""
    numbers = {at_least(1)(part) for part in text.split(",")} - {1}
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text}: a number of ranks must be >= 2")
    return sorted(numbers)


def run(args: argparse.Namespace) -> int:
    from hvdtrain.runtime.environment import launched_size
    from hvdtrain.runtime.signals import leave_on_sigterm

    if (launched_size() or 1) > 1:
        raise UserError("hvdtrain bench starts its own ranks: run it without a launcher")
    leave_on_sigterm()
    report = _measure(args)
    print(report.to_json() if args.format == "json" else report.to_table())
    return 0


def _measure(args: argparse.Namespace) -> Report | AllreduceReport | ExchangeReport:
    if args.action == "allreduce":
        return _allreduce(args)
    if args.action == "exchange":
        return _exchange(args)
    return _of_a_run(args)


def _allreduce(args: argparse.Namespace) -> AllreduceReport:
    from hvdtrain.bench.allreduce import allreduce, parse_sizes
    from hvdtrain.bench.processes import choose_hosts

    sizes = parse_sizes(args.sizes)
    hosts = choose_hosts(args.hosts, args.np) if args.hosts else None
    if args.plot is not None:
        check_plot(args.plot)  # before measuring, which takes minutes
    report = allreduce(sizes, args.rounds, args.np, hosts)
    if args.plot is not None:
        from hvdtrain.report import bench_charts, html

        chart = bench_charts.bandwidth(report.bus_bandwidths())
        write_atomic(args.plot, html.of_chart("hvdtrain bench allreduce", chart).encode())
    return report


def _exchange(args: argparse.Namespace) -> ExchangeReport:
    from hvdtrain.bench.exchange import (
        RankPlacement,
        check_steps,
        exchange,
        parse_strategies,
    )
    from hvdtrain.bench.processes import choose_hosts
    from hvdtrain.config import parse
    from hvdtrain.exchange.config import STRATEGIES

    check_steps(args.steps)
    strategies = parse_strategies(args.strategies or ",".join(STRATEGIES))
    hosts = choose_hosts(args.hosts, args.np) if args.hosts else None
    flags = ["--config", args.preset, *args.flags]
    _check_shares(parse(flags).config.batch.micro_batches, [args.np])
    if args.plot is not None:
        check_plot(args.plot)
    ranks = RankPlacement(args.np, hosts, args.launcher)
    report = exchange(flags, strategies, args.steps, args.rounds, ranks)
    if args.plot is not None:
        from hvdtrain.report import bench_charts, html

        curves = {name: found[0].smoothed() for name, found in report.curves.items()}
        chart = bench_charts.losses(curves)
        write_atomic(args.plot, html.of_chart("hvdtrain bench exchange", chart).encode())
    return report


def _of_a_run(args: argparse.Namespace) -> Report:
    from hvdtrain.bench import benchmarks, elastic
    from hvdtrain.config import parse

    own = _FLAGS.get(args.action, ())
    flags = ["--config", args.preset, *own, *args.flags]
    config = parse(flags).config
    if args.action == "scaling":
        scale = benchmarks.Scale(args.np, args.hosts, config.batch.global_size, args.weak)
        if not scale.weak:
            _check_shares(config.batch.micro_batches, scale.ranks, ", or --weak")
        return benchmarks.scaling(flags, args.steps, args.rounds, scale)
    if args.action == "elastic":
        return elastic.elastic(flags, args.steps, args.rounds)
    if args.action == "recovery":
        hosts, root = args.hosts or f"localhost:{args.np}", Path(config.run.root).absolute()
        return elastic.recovery(flags, args.steps, args.rounds, args.np, hosts, root)
    found: Report = getattr(benchmarks, args.action)(flags, args.steps, args.rounds)
    return found


def _check_shares(micro_batches: int, numbers: Sequence[int], instead: str = "") -> None:
    for ranks in numbers:
        if micro_batches % ranks:
            raise UserError(
                f"{micro_batches} micro-batches cannot be shared evenly among {ranks} ranks; "
                f"choose another batch.micro_size{instead}"
            )
