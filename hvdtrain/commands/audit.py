"""`hvdtrain audit RUN`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.errors import EXIT_CRASH

HELP = "prove from a run's files that each step was applied exactly once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    from hvdtrain.audit.report import audit

    found = audit(args.run)
    print(found.to_json() if args.format == "json" else found.to_text())
    return 0 if found.clean else EXIT_CRASH
