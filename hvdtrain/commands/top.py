"""`hvdtrain top RUN`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.commands.arguments import number_at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, or its targets.json")
    parser.add_argument(
        "--interval",
        type=number_at_least(0.1),
        default=2.0,
        help="seconds between updates (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print a plain table of all ranks")
    parser.add_argument("--auth-file", metavar="FILE", help="one line user:password")
    parser.add_argument("--ca-file", metavar="FILE", help="certificates to trust (PEM)")


def run(args: argparse.Namespace) -> int:
    from hvdtrain.top.scrape import Scraper
    from hvdtrain.top.screen import live, once

    file = args.run / "targets.json" if args.run.is_dir() else args.run
    scraper = Scraper(args.auth_file, args.ca_file)
    return (once if args.once else live)(file, scraper, args.interval)
