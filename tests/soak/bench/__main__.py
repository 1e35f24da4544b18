"""`make dev-bench`: benchmarks for developers; `hvdtrain bench` is for users.

   python -m tests.soak.bench layouts

layout-speed

telemetry

scrape

rendezvous

agents [--key value]

own-loop

small-steps

replays

streams

formats

torchft-recovery
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from hvdtrain.bench.report import Report
from hvdtrain.config import parse
from hvdtrain.errors import EXIT_CRASH, UserError
from hvdtrain.runtime.signals import leave_on_sigterm
from tests.soak.bench.agents import agents
from tests.soak.bench.copies import copies
from tests.soak.bench.formats import formats
from tests.soak.bench.layout_speed import layout_speed
from tests.soak.bench.layouts import LAYOUTS, TINY, Where, layouts
from tests.soak.bench.layouts_report import LayoutsReport
from tests.soak.bench.own_loop import own_loop
from tests.soak.bench.peer_recovery import peer_recovery
from tests.soak.bench.rendezvous import rendezvous
from tests.soak.bench.replays import replays
from tests.soak.bench.small_steps import small_steps
from tests.soak.bench.start import start
from tests.soak.bench.streams import streams
from tests.soak.bench.telemetry import scrape, telemetry


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    leave_on_sigterm()
    try:
        report = args.measure(args)
    except UserError as error:
        print(f"dev-bench: error: {error}", file=sys.stderr)
        return error.exit_code
    print(report.to_json() if args.format == "json" else report.to_table())
    return EXIT_CRASH if isinstance(report, LayoutsReport) and not report.met else 0


def _layouts(args: argparse.Namespace) -> LayoutsReport:
    flags = [*TINY, *args.flags]
    parse(flags)  # reports wrong flags before any rank starts
    where = Where(args.np, args.hosts, args.launcher)
    return layouts(flags, args.steps, where, args.layout or LAYOUTS)


def _layout_speed(args: argparse.Namespace) -> Report:
    return layout_speed(_flags(args), args.steps, args.rounds)


def _telemetry(args: argparse.Namespace) -> Report:
    return telemetry(_flags(args), args.steps, args.rounds)


def _scrape(args: argparse.Namespace) -> Report:
    return scrape(_flags(args), args.steps, args.rounds, args.np)


def _own_loop(args: argparse.Namespace) -> Report:
    return own_loop(args.flags, args.steps, args.rounds)


def _small_steps(args: argparse.Namespace) -> Report:
    return small_steps(args.flags, args.steps, args.rounds)


def _replays(args: argparse.Namespace) -> Report:
    return replays(_flags(args), args.steps, args.rounds)


def _copies(args: argparse.Namespace) -> Report:
    return copies(_flags(args), args.rounds)


def _start(args: argparse.Namespace) -> Report:
    return start(_flags(args), args.rounds)


def _rendezvous(args: argparse.Namespace) -> Report:
    return rendezvous(args.np, args.rounds)


def _agents(args: argparse.Namespace) -> Report:
    return agents(args.np, args.rounds)


def _streams(args: argparse.Namespace) -> Report:
    return streams(args.shards, args.steps, args.rounds, args.workers)


def _formats(args: argparse.Namespace) -> Report:
    return formats(args.steps, args.rounds, args.workers)


def _torchft_recovery(args: argparse.Namespace) -> Report:
    return peer_recovery(args.kills)


def _flags(args: argparse.Namespace) -> list[str]:
    flags = ["--config", args.preset, *args.flags]
    parse(flags)  # as above
    return flags


# name -> (function, help, defaults of its numbers)
_ACTIONS: Mapping[
    str, tuple[Callable[[argparse.Namespace], Report | LayoutsReport], str, Mapping[str, int]]
] = {
    "layouts": (
        _layouts,
        "models that span ranks, on many layouts: losses compared with one rank's",
        {"np": 16, "steps": 20},
    ),
    "layout-speed": (
        _layout_speed,
        "2 ranks that share a model against torch's own scripts",
        {"steps": 2, "rounds": 20},
    ),
    "telemetry": (
        _telemetry,
        "2 ranks, alternating between all telemetry and none",
        {"steps": 10, "rounds": 40},
    ),
    "scrape": (
        _scrape,
        "ranks that are scraped every second against unscraped",
        {"np": 2, "steps": 20, "rounds": 10},
    ),
    "own-loop": (
        _own_loop,
        "a script's own loop on 2 ranks, in turns with a task and with a loop written for Horovod",
        {"steps": 10, "rounds": 40},
    ),
    "small-steps": (
        _small_steps,
        "steps of small models, in turns with plain torch, Lightning, Accelerate and DDP",
        {"steps": 500, "rounds": 10},
    ),
    "replays": (
        _replays,
        "2 ranks with replays every 5 and every 200 steps, in turns with none",
        {"steps": 20, "rounds": 20},
    ),
    "copies": (
        _copies,
        "4 ranks on 2 hosts that share a model, with copies in memory every 5 steps; needs root",
        {"rounds": 5},
    ),
    "start": (
        _start,
        "from a command to the end of its fourth step, in turns with torchrun and a DDP script",
        {"rounds": 5},
    ),
    "rendezvous": (
        _rendezvous,
        "the requests of a rendezvous of many ranks, without ranks",
        {"np": 256, "rounds": 3},
    ),
    "agents": (
        _agents,
        "the driver of many simulated agents and ranks, and another driver in its place",
        {"np": 256, "rounds": 3},
    ),
    "streams": (
        _streams,
        "loading tokens from many tar shards, in turns with torchdata and webdataset",
        {"shards": 1000, "steps": 200, "rounds": 5, "workers": 1},
    ),
    "formats": (
        _formats,
        "loading files of other programs, in turns with their own readers",
        {"steps": 100, "rounds": 5, "workers": 0},
    ),
    "torchft-recovery": (
        _torchft_recovery,
        "the pause after one of 4 ranks is killed, and of torchft, which it installs",
        {"kills": 5},
    ),
}
_WITHOUT_PRESET = ("own-loop", "small-steps")
_WITHOUT_RUNS = ("rendezvous", "agents", "streams", "formats", "torchft-recovery")
_NUMBERS = {
    "np": "ranks", "steps": "in one turn", "rounds": "turns", "shards": "tar files",
    "workers": "processes of each loader", "kills": "of a rank",
}  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dev-bench", description=__doc__)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, (measure, line, numbers) in _ACTIONS.items():
        action = actions.add_parser(name, help=line, description=line)
        action.set_defaults(measure=measure)
        for key, number in numbers.items():
            what = f"{_NUMBERS[key]} (default: %(default)s)"
            action.add_argument(f"--{key}", type=int, default=number, help=what)
        action.add_argument("--format", choices=("table", "json"), default="table")
        if name == "layouts":
            action.add_argument("--hosts", metavar="A:8,B:8", help="default: this host")
            action.add_argument("--launcher", choices=("gloo", "mpi"), default="gloo")
            action.add_argument(
                "--layout",
                action="append",
                metavar="'data 2 x tensor 2'",
                help="as often as wanted; default: a table of them",
            )
        elif name not in (*_WITHOUT_RUNS, *_WITHOUT_PRESET):
            action.add_argument("--preset", default="gpt-nano", help="or a YAML file")
        if name not in _WITHOUT_RUNS:
            action.add_argument("flags", nargs="*", metavar="-- --key value", help="of the runs")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
