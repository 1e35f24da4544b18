"""`hvdtrain doctor`: find what would fail on these hosts, or why a run failed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.commands.arguments import at_least
from hvdtrain.errors import EXIT_CRASH, UserError

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--hosts", metavar="LIST", help="such as node1:8,node2:8 (default: only this host)"
    )
    source.add_argument("--hostfile", metavar="FILE", help="lines such as 'node1 slots=8'")
    source.add_argument("--slurm", action="store_true", help="use the nodes of this Slurm job")
    parser.add_argument(
        "--np", type=at_least(1), metavar="N", help="ranks (default: all slots of the hosts)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN | -- --key value",
        help="run directory to diagnose, or keys whose run.root and data to check",
    )
    parser.usage = (
        f"{parser.prog} [--hosts LIST | --hostfile FILE | --slurm] [--np N] [--format json] "
        f"[-- --key value ...]\n       {parser.prog} RUN [--format json]"
    )


def run(args: argparse.Namespace) -> int:
    if not args.words or args.words[0].startswith("-"):
        return _examine_hosts(args)
    directory, *more = args.words
    if more or args.hosts or args.hostfile or args.slurm or args.np:
        raise UserError(
            f"{directory} is read as a run directory, which is examined alone: --hosts, --np and "
            "configuration keys are for checks of hosts; keys follow `--`"
        )
    return _examine_run(Path(directory), args.format)


def _examine_hosts(args: argparse.Namespace) -> int:
    from hvdtrain.config import parse
    from hvdtrain.doctor.examine import Request, examine
    from hvdtrain.doctor.findings import examination_json, failed, notes, show
    from hvdtrain.launch.hostfile import read_hosts, total_slots

    root = parse(args.words).config.run.root
    named = args.hosts or args.hostfile or args.slurm
    hosts = read_hosts(args.hosts, args.hostfile, args.slurm) if named else []
    if args.np and hosts and total_slots(hosts) < args.np:
        raise UserError(f"--np {args.np}, but the hosts have {total_slots(hosts)} slots together")
    # Reading the data takes a while, and only some keys determine which data it is.
    data = any(word.startswith("--") and not word.startswith("--run.") for word in args.words)
    flags = args.words if data else None
    found = examine(Request(hosts, args.np or 0, root, flags, notice=_notice))
    if args.format == "json":
        print(examination_json(found))
    else:
        show(found.findings, list(notes(found)), _console())
    return EXIT_CRASH if failed(found.findings) else 0


def _console() -> Console:
    """Return the terminal; in a file or a pipe, the table gets a fixed width."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def _notice(text: str) -> None:
    print(f"hvdtrain: {text}", file=sys.stderr, flush=True)


def _examine_run(directory: Path, form: str) -> int:
    from hvdtrain.doctor.findings import as_json, failed, show
    from hvdtrain.doctor.runs import diagnose

    findings, how = diagnose(directory)
    if form == "json":
        print(as_json(findings, run=str(directory), ended=how))
    else:
        show(findings, [how], _console())
    return EXIT_CRASH if failed(findings) else 0
