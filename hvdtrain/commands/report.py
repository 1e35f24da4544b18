"""`hvdtrain report RUN [OTHER]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.files import write_atomic

HELP = "show a run, or two side by side, as an HTML file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("other", type=Path, nargs="?", metavar="B", help="a run to compare it with")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: RUN/report.html, of two B/compare.html"
    )
    parser.add_argument(
        "--format", choices=("html", "json"), default="html", help="json: the figures, to stdout"
    )


def run(args: argparse.Namespace) -> int:
    from hvdtrain.report.figures import figures
    from hvdtrain.report.run import read

    if args.format == "json" and args.out is not None:
        raise UserError("--out names the HTML file; --format json is printed: leave one away")
    paths = [args.run] if args.other is None else [args.run, args.other]
    runs = [read(path) for path in paths]
    found = [figures(run) for run in runs]
    if args.format == "json":
        print(json.dumps(_content(found), indent=1, allow_nan=False))
        return 0
    from hvdtrain.report import page

    if args.other is None:
        text, out = page.one(runs[0], found[0]), args.out or args.run / "report.html"
    else:
        text = page.two(runs[0], runs[1], (found[0], found[1]))
        out = args.out or args.other / "compare.html"
    _write(out, text)
    print(out)
    return 0


def _content(found: list[Any]) -> Any:
    if len(found) == 1:
        return found[0]
    from hvdtrain.report.ratios import ratios

    return {"a": found[0], "b": found[1], "ratios": ratios(*found)}


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); choose another place with --out"
        ) from None
