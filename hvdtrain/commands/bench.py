"""`hvdtrain bench overhead | scaling | memory | checkpoint | elastic | telemetry | ...`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from hvdtrain.errors import UserError

HELP = "measure a training step and its scaling"

# name -> (help, default preset, default steps, default rounds)
_ACTIONS = {
    "overhead": ("a step of hvdtrain against a plain PyTorch loop", "gpt-nano", 2, 30),
    "scaling": ("2 ranks against 1, and against torch's DDP", "gpt-nano", 20, 3),
    "memory": ("memory of a rank against a plain PyTorch loop", "gpt-nano", 5, 1),
    "checkpoint": ("a save behind the steps, and its restore", "gpt-small", 50, 2),
    "elastic": ("2 ranks of an elastic job against 2 of one that is not", "gpt-nano", 4, 100),
    "telemetry": ("2 ranks with all telemetry and without, by turns", "gpt-nano", 10, 40),
    "scrape": ("ranks that are scraped every second against unscraped", "gpt-nano", 20, 10),
    "rendezvous": ("the requests of a rendezvous of many ranks, without ranks", "gpt-nano", 1, 3),
    "recovery": ("kill -9 of a rank of an elastic job", "gpt-nano", 10, 3),
}
_RANKS = {"recovery": 2, "scrape": 2, "rendezvous": 256}
# The size of the state counts, not of the batch; shorter steps make the stall's share larger.
_FLAGS = {
    "checkpoint": ("--batch.global_size=1", "--batch.micro_size=1", "--model.context=64"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (line, preset, steps, rounds) in _ACTIONS.items():
        action = actions.add_parser(
            name,
            help=line,
            description=f"{line}. Sides take turns, and ratios are of neighbours in time, so that "
            "other programs on the machine disturb both alike.",
        )
        action.add_argument(
            "--preset", default=preset, help="or a YAML file (default: %(default)s)"
        )
        action.add_argument(
            "--steps", type=_positive, default=steps, help="in one turn (default: %(default)s)"
        )
        action.add_argument(
            "--rounds", type=_positive, default=rounds, help="turns (default: %(default)s)"
        )
        if name in _RANKS:
            action.add_argument(
                "--np", type=_two_or_more, default=_RANKS[name], help="ranks (default: %(default)s)"
            )
        if name == "recovery":
            action.add_argument(
                "--hosts", metavar="A:8,B:8", help="default: this host; run.root is on all of them"
            )
        action.add_argument("--format", choices=("table", "json"), default="table")
        action.add_argument(
            "flags", nargs="*", metavar="-- --key value", help="keys of the configuration"
        )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not >= 1")
    return number


def _two_or_more(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{number} is not >= 2")
    return number


def run(args: argparse.Namespace) -> int:
    from hvdtrain.bench import benchmarks, elastic, rendezvous, telemetry
    from hvdtrain.config import parse
    from hvdtrain.runtime.environment import launched_size

    if (launched_size() or 1) > 1:
        raise UserError("hvdtrain bench starts its ranks itself: call it without a launcher")
    flags = ["--config", args.preset, *_FLAGS.get(args.action, ()), *args.flags]
    config = parse(flags).config
    batch = config.batch
    if args.action == "scaling" and batch.micro_batches % benchmarks.RANKS:
        raise UserError(
            f"{batch.micro_batches} micro-batches cannot be shared evenly among "
            f"{benchmarks.RANKS} ranks; choose another batch.micro_size"
        )
    signal.signal(signal.SIGTERM, _end)
    if args.action == "elastic":
        report = elastic.elastic(flags, args.steps, args.rounds)
    elif args.action == "telemetry":
        report = telemetry.telemetry(flags, args.steps, args.rounds)
    elif args.action == "scrape":
        report = telemetry.scrape(flags, args.steps, args.rounds, args.np)
    elif args.action == "rendezvous":
        report = rendezvous.rendezvous(args.np, args.rounds)
    elif args.action == "recovery":
        hosts, root = args.hosts or f"localhost:{args.np}", Path(config.run.root).absolute()
        report = elastic.recovery(flags, args.steps, args.rounds, args.np, hosts, root)
    else:
        report = getattr(benchmarks, args.action)(flags, args.steps, args.rounds)
    print(report.to_json() if args.format == "json" else report.to_table())
    return 0


def _end(number: int, frame: object) -> NoReturn:
    """Leaves through the `finally` of those who have started processes."""
    sys.exit(128 + number)
