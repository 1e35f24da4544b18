"""`hvdtrain ls [ROOT]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.run_files.listing import ListedRun, runs_under
from hvdtrain.text import aligned, finite
from hvdtrain.untrusted import printable

_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "root",
        type=Path,
        nargs="?",
        default=Path("runs"),
        metavar="ROOT",
        help="directory of the runs (default: %(default)s)",
    )
    parser.add_argument(
        "--sort",
        choices=[*_COLUMNS],
        default="age",
        help="sort column, ascending; age: the newest run last (default: %(default)s)",
    )
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="json: a list of objects; age in seconds (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    runs = sorted(runs_under(args.root), key=_key(args.sort))
    if args.format == "json":
        print(json.dumps(finite([asdict(run) for run in runs]), indent=1))
        return 0
    rows = [[*_COLUMNS], *([show(run) for show in _COLUMNS.values()] for run in runs)]
    print("\n".join(aligned(rows, left=range(len(_COLUMNS)))))
    return 0


def _key(column: str) -> Callable[[ListedRun], tuple[Any, ...]]:
    """Sort unknown values first; break ties by name."""
    sign = -1 if column == "age" else 1

    def key(run: ListedRun) -> tuple[Any, ...]:
        value = finite(asdict(run))[column]
        ordered = value if isinstance(value, str) or value is None else sign * value
        return value is not None, ordered if value is not None else 0, run.id

    return key


def _step(run: ListedRun) -> str:
    of = f"/{run.steps}" if run.steps else ""
    return "-" if run.step is None else f"{run.step}{of}"


def _age(run: ListedRun) -> str:
    if run.age is None:
        return "-"
    size, unit = next((unit for unit in _UNITS if run.age >= unit[0]), (1, "s"))
    return f"{run.age / size:.0f} {unit}"


_COLUMNS: dict[str, Callable[[ListedRun], str]] = {
    "id": lambda run: printable(run.id),
    "state": lambda run: run.state,
    "step": _step,
    "loss": lambda run: "-" if run.loss is None else f"{run.loss:.4f}",
    "ranks": lambda run: "-" if run.ranks is None else str(run.ranks),
    "age": _age,
}
