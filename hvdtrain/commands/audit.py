"""`hvdtrain audit RUN`, `hvdtrain audit --same A B`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.errors import EXIT_CRASH, EXIT_USER, UserError
from hvdtrain.untrusted import printable_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="run directory")
    parser.add_argument(
        "--same",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="compare two runs instead: losses, norms and state hashes of each step, bit by bit",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    if (args.run is None) == (args.same is None):
        raise UserError("hvdtrain audit requires either RUN or --same A B")
    if args.same is not None:
        from hvdtrain.audit.same import compare

        comparison = compare(*args.same)
        text = comparison.to_json() if args.format == "json" else comparison.to_text()
        print(printable_lines(text))
        return 0 if comparison.same else EXIT_CRASH
    from hvdtrain.audit.report import audit

    found = audit(args.run)
    print(printable_lines(found.to_json() if args.format == "json" else found.to_text()))
    return EXIT_USER if found.clean is None else 0 if found.clean else EXIT_CRASH
