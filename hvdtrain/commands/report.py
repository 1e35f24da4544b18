"""`hvdtrain report RUN [OTHER]`, `hvdtrain report --serve [RUN | ROOT]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hvdtrain.commands.output import write_out
from hvdtrain.errors import UserError
from hvdtrain.text import finite

_HOST, _PORT, _ROOT = "127.0.0.1", 8642, Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="run directory; see --serve"
    )
    parser.add_argument("other", type=Path, nargs="?", metavar="B", help="a run to compare it with")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: RUN/report.html, or B/compare.html for two runs",
    )
    parser.add_argument(
        "--format", choices=("html", "json"), default="html", help="json: the metrics, to stdout"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="show RUN, or all runs of a directory (default: runs), live in a browser",
    )
    parser.add_argument(
        "--host",
        help=f"with --serve: address to listen on (default: {_HOST})",
    )
    parser.add_argument(
        "--port", type=int, help=f"with --serve: port to listen on (default: {_PORT})"
    )


def run(args: argparse.Namespace) -> int:
    if args.serve:
        return _serve(args)
    if args.host is not None or args.port is not None:
        raise UserError("--host and --port require --serve")
    if args.run is None:
        raise UserError("a run directory is required: hvdtrain report RUN")
    if args.format == "json" and args.out is not None:
        raise UserError(
            "--out and --format json exclude each other: --out names the HTML file, JSON is printed"
        )
    return _report(args)


def _serve(args: argparse.Namespace) -> int:
    if args.other is not None or args.out is not None or args.format != "html":
        raise UserError("--serve accepts one directory, and neither --out nor --format")
    if args.port is not None and not 0 <= args.port <= 65535:
        raise UserError(f"--port {args.port}: ports lie in 0..65535; 0 = any free port")
    from hvdtrain.report.web.server import serve

    return serve(args.run or _ROOT, args.host or _HOST, _PORT if args.port is None else args.port)


def _report(args: argparse.Namespace) -> int:
    from hvdtrain.report.metrics import run_metrics
    from hvdtrain.report.run import read

    paths = [args.run] if args.other is None else [args.run, args.other]
    runs = [read(path) for path in paths]
    found = [run_metrics(run) for run in runs]
    if args.format == "json":
        print(json.dumps(finite(_content(found)), indent=1, allow_nan=False))
        return 0
    from hvdtrain.report import html, page

    if args.other is None:
        shown, out = page.one(runs[0], found[0]), args.out or args.run / "report.html"
    else:
        shown = page.two(runs[0], runs[1], (found[0], found[1]))
        out = args.out or args.other / "compare.html"
    write_out(out, html.document(shown))
    print(out)
    return 0


def _content(found: list[Any]) -> Any:
    if len(found) == 1:
        return found[0]
    from hvdtrain.report.metrics import ratios

    return {"a": found[0], "b": found[1], "ratios": ratios(*found)}
