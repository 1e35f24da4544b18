"""`python -m tests.soak.third_parties`: parts of third parties in loops of their own.

    python -m tests.soak.third_parties install    install the packages into build/third-parties
    python -m tests.soak.third_parties [ROW...]   run all rows, or these; update docs/third-party.md

Each row is a part of tests/support/third_parties, in a small model. Runs train all parts at once,
see tests/support/third_parties/script.py. If such a run fails, its parts are divided until those
that fail are alone. Two runs give one result if all tensors at the end are bitwise identical, on
all ranks. All rows take 10 to 20 minutes on two cores.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = REPOSITORY / "build/third-parties"
PAGE = REPOSITORY / "docs/third-party.md"
BEGIN, END = "<!-- begin of {} -->", "<!-- end of {} -->"
# Without their dependencies, which the tests' environment or other lines have.
PINS = """
    adabelief-pytorch==0.2.1 adam-mini==1.1.1 apollo-torch==1.0.3 came-pytorch==0.1.3
    dadaptation==3.2 ema-pytorch==0.8.3 galore-torch==1.0 heavyball==3.2.1 lion-pytorch==0.2.5
    muon-optimizer==0.1.0 prodigy-plus-schedule-free==2.0.1 pytorch-warmup==0.2.0
    schedulefree==1.4.1 timm==1.0.31 torch-ema==0.3 torch-optimizer==0.3.0 torchmetrics==1.9.0
    x-transformers==2.31.10 performer-pytorch==1.1.4
    axial-positional-embedding==0.3.12 colorama==0.4.6 hyper-connections==0.4.11
    lightning-utilities==0.15.3
    local-attention==1.11.2 pytorch-ranger==0.1.1 tabulate==0.10.0 torchvision==0.28.0
"""
COLUMNS = ("plain loop, resumed", "resumed", "2 ranks", "3 ranks", "rank replaced")

sys.path.append(str(PACKAGES))
os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(PACKAGES)])  # of forked ranks

from tests.support.third_parties import GROUPS, PARTS, installed, plain, runs  # noqa: E402

runs.PRELOAD = "torch._dynamo tests.support.third_parties.imported"
Run = Callable[[Path, Sequence[str]], list[runs.End]]


class Runs:
    """Runs of parts in one directory.

    A part's results depend on the parts next to it: all draw from the same random numbers, and some
    optimizers amplify roundings. Runs are therefore compared with a whole run of the same parts.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._whole: dict[tuple[str, ...], runs.End] = {}

    def cells(self, run: Run, parts: Sequence[str]) -> dict[str, str]:
        """Return the cell of each part, from a run of all or, if that fails, of some of them."""
        if not parts:
            return {}
        try:
            if tuple(parts) not in self._whole:
                [self._whole[tuple(parts)]] = self._ends(runs.whole, parts)
            expected = self._whole[tuple(parts)]
            ends = [expected] if run is runs.whole else self._ends(run, parts)
        except (runs.PartsError, AssertionError) as error:
            if len(parts) == 1:
                return {parts[0]: f"refused: {cell(str(error))}"}
            middle = len(parts) // 2
            return self.cells(run, parts[:middle]) | self.cells(run, parts[middle:])
        return {part: shown(runs.difference(ends, expected, part)) for part in parts}

    def _ends(self, run: Run, parts: Sequence[str]) -> list[runs.End]:
        began, why = time.monotonic(), ""
        try:
            return run(Path(tempfile.mkdtemp(dir=self._root)), parts)
        except (runs.PartsError, AssertionError) as error:
            why = f": {cell(str(error))}"
            raise
        finally:
            print(f"{time.monotonic() - began:5.0f} s  {len(parts)} parts{why}", flush=True)


def plain_cell(part: str) -> str:
    """Return the cell of a plain loop."""
    try:
        whole = {part: plain.end_of(part)}
        again = {part: plain.end_of(part)}
        resumed = {part: plain.end_of(part, runs.STOPPED_AFTER)}
    except Exception as error:  # anything that a third party raises
        return cell(f"{type(error).__name__}: {error}")
    if runs.difference([again], whole, part):
        return "differs from run to run"
    return shown(runs.difference([resumed], whole, part))


def shown(difference: float) -> str:
    return "exact" if difference == 0 else f"differs by {difference:.0e}"


def cell(message: str) -> str:
    [line, *_] = message.splitlines()
    short = line if len(line) <= 160 else f"{line[:160]}..."
    return short.replace("|", "\\|").replace("<", "&lt;").replace(str(PACKAGES), "")


def table(names: Sequence[str], root: Path) -> dict[str, list[str]]:
    """Run parts; return the cells of each."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells = {name: [plain_cell(name)] for name in names}
    every = Runs(root)
    columns: dict[str, Run] = {
        "resumed": runs.resumed,
        "2 ranks": lambda root, parts: runs.whole(root, parts, "gloo:2"),
        "3 ranks": lambda root, parts: runs.whole(root, parts, "mpirun:3"),
        "rank replaced": runs.replaced,
    }
    refused = {n: c for n, c in every.cells(runs.whole, names).items() if c != "exact"}
    good = [name for name in names if name not in refused]
    for name, why in refused.items():
        cells[name] += [why, *[""] * (len(columns) - 1)]
    for column, run in columns.items():
        print(column, flush=True)
        for name, found in every.cells(run, good).items():
            cells[name].append(found)
    return cells


def update(page: str, group: str, rows: dict[str, str]) -> str:
    """Return the page with these lines in the table of a group, instead of those of one name."""
    before, rest = page.split(BEGIN.format(group))
    old, after = rest.split(END.format(group))
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in old.strip().splitlines()[2:]}
    lines |= rows
    names = [name for name in GROUPS[group] if name in lines]
    head = ["part", "package", *COLUMNS, "date"]
    text = [line_of(head), line_of(["---"] * len(head)), *(lines[name] for name in names)]
    return "\n".join([before + BEGIN.format(group), *text, END.format(group) + after])


def line_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def install() -> int:
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target"]
    return subprocess.run([*pip, str(PACKAGES), *PINS.split()]).returncode


def main(argv: Sequence[str]) -> int:
    """Return 0 if all rows could be run, whatever their results are."""
    if [*argv] == ["install"]:
        return install()
    if unknown := {*argv} - PARTS.keys():
        print(f"unknown row {min(unknown)}; rows: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    chosen = argv or [*PARTS]
    names = [name for name in chosen if installed(name)]
    with tempfile.TemporaryDirectory(prefix="third-parties-") as directory:
        cells = table(names, Path(directory))
    for group, parts in GROUPS.items():
        rows = {}
        for name in (name for name in parts if name in names):
            what = f"{parts[name][0]} {installed(name)}"
            rows[name] = line_of([name, what, *cells[name], str(datetime.date.today())])
            print(rows[name])
        PAGE.write_text(update(PAGE.read_text(), group, rows))
    missing = [name for name in chosen if name not in names]
    for name in missing:
        print(f"{name}: not run, {PARTS[name][0]} is not installed")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
