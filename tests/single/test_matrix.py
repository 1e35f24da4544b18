"""`make matrix`: cells from the output of pytest, and rows in the page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import matrix
from tests.support.runs import REPOSITORY

TESTS = """
import pytest
def test_passes(): pass
def test_fails(): raise ValueError("no | such thing")
@pytest.mark.skip(reason="needs root")
def test_is_skipped(): pass
"""
CELLS = dict.fromkeys(matrix.COLUMNS, "yes")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, subprocess.CompletedProcess[str]]:
    """(JUnit report, process) of pytest with tests that pass, fail, or are skipped."""
    directory = tmp_path_factory.mktemp("tests")
    (directory / "test_exact.py").write_text(TESTS)
    (directory / "test_recorded_run.py").write_text("def test_passes(): pass")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--junit-xml=report.xml",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, "."], cwd=directory, capture_output=True, text=True, timeout=60
    )
    return (directory / "report.xml").read_text(), done


def test_every_file_with_smoke_tests_has_a_column() -> None:
    found = subprocess.run(
        ["grep", "-rl", "mark[.]smoke", "tests/single", "tests/cluster", "--include=test_*.py"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    names = {Path(file).stem for file in found.stdout.split()}
    assert names == set(matrix.SMOKE.values())


def test_column_fails_with_the_reason_of_its_test(
    ended: tuple[str, subprocess.CompletedProcess[str]],
) -> None:
    cells, reasons = matrix.smoke_cells(ended[0], ended[1].stdout)
    assert (cells["one process"], cells["exact"]) == ("yes", "**no**")
    assert cells["parallel axes"] == "**no**", "its tests did not run"
    assert reasons[0] == "test_fails: ValueError: no | such thing"


def test_run_without_a_report_fails_in_all_columns() -> None:
    cells, reasons = matrix.smoke_cells("", "make: ***\nImportError: no torch\n")
    assert set(cells.values()) == {"**no**"} and reasons == ["ImportError: no torch"]


def test_parallel_tests_pass_only_if_the_launcher_ends_well(
    ended: tuple[str, subprocess.CompletedProcess[str]],
) -> None:
    _, done = ended
    assert done.returncode == 1
    assert matrix.parallel_cell(1, done.stdout) == (
        "**no**", ["test_fails - ValueError: no | such thing"]
    )  # fmt: skip
    assert matrix.parallel_cell(0, done.stdout) == ("2 passed", [])
    both = "[0]<stdout>:283 passed, 3 skipped in 8 s\n[1]<stdout>:283 passed\n27 passed in 2 s"
    assert matrix.parallel_cell(0, both)[0] == "310 passed"
    assert matrix.parallel_cell(139, "145 passed in 3.0s\nsignal 11")[0] == "**no**"


def test_row_replaces_only_the_row_of_the_same_name() -> None:
    page = f"# Page\n\n{matrix.BEGIN}\n{matrix.END}\n\nmore\n"
    for name, torch in (("torch-a", "2.6.0"), ("torch-b", "2.9.1"), ("torch-a", "2.6.1")):
        page = matrix.merge(page, {**CELLS, "row": name, "torch": torch})
    lines = page.splitlines()
    assert lines[0] == "# Page" and lines[-1] == "more"
    rows = [line.split(" | ")[:3] for line in lines if line.startswith("| torch-")]
    assert rows == [["| torch-a", "yes", "2.6.1"], ["| torch-b", "yes", "2.9.1"]]
