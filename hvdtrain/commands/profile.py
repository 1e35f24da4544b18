"""`hvdtrain profile summary RUN`. Nothing here imports torch or Horovod."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.untrusted import printable_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    line = "tables of time, memory, lateness and operators from RUN/profile"
    summary = actions.add_parser("summary", help=line, description=f"{line}.")
    summary.add_argument("run", type=Path, metavar="RUN", help="run directory")
    summary.add_argument("--format", choices=("text", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    from hvdtrain.telemetry.profile_summary import summarize, to_json, to_text

    parts = summarize(args.run)
    print(printable_lines(to_json(parts) if args.format == "json" else to_text(parts)))
    return 0
