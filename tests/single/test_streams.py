"""Commands and runs whose standard streams are closed, or on a full disk."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import TINY, TRAIN, environment, losses

FULL = "hvdtrain: error: the output could not be written (No space left on device)\n"


def _run(command: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    argv = ["sh", "-c", f"{shlex.join(command)} {redirection}"]
    return subprocess.run(argv, capture_output=True, text=True, env=environment(), check=False)


@pytest.mark.parametrize(
    ("redirection", "code", "error"),
    [
        ("2>&-", 0, ""),
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, FULL),
        (">/dev/full 2>/dev/full", 1, ""),
    ],
)
def test_command_whose_output_is_closed_or_full_prints_no_traceback(
    redirection: str, code: int, error: str
) -> None:
    done = _run([sys.executable, "-m", "hvdtrain.cli", "tasks"], redirection)
    assert (done.returncode, done.stderr) == (code, error), done


@pytest.mark.slow
def test_run_whose_output_is_closed_and_full_is_complete(tmp_path: Path) -> None:
    flags = [*TINY, "--train.duration", "2", "--run.root", str(tmp_path), "--run.id", "run"]
    done = _run([*TRAIN, *flags], ">/dev/full 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(losses(tmp_path / "run")) == 2
    for file in (tmp_path / "run").glob(".*"):  # none is the process's stderr
        assert b"hvdtrain" not in file.read_bytes()
