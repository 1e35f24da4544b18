"""Machine set-up: package manager output goes to a log file, which errors name."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.runs import REPOSITORY


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A clone's .ci that needs one package, and an apt-get with much output."""
    shutil.copytree(REPOSITORY / ".ci", tmp_path / "clone/.ci")
    (tmp_path / "clone/.ci/packages").write_text(f"build fancy test -e {tmp_path}/fancy\n")
    (tmp_path / "bin").mkdir()
    apt = (
        'echo "Reading $*"; echo "Reading it" >&2\n'
        f"[ ! -e {tmp_path}/broken ] || exit 100\n"
        f'case "$*" in *install*) touch {tmp_path}/fancy;; esac'
    )
    for name, script in (("apt-get", apt), ("id", "echo 0")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def _set_up(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [directory / "clone/.ci/set-up", "build"],
        env=os.environ | {"PATH": f"{directory}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_apt_output_goes_to_the_log_file(directory: Path) -> None:
    done = _set_up(directory)
    assert done.returncode == 0, done.stderr
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line == "hvdtrain: installing fancy (apt-get's output: build/set-up.log)"
    log = (directory / "clone/build/set-up.log").read_text()
    assert log.count("Reading") == 4 and "install -y --no-install-recommends fancy" in log
    again = _set_up(directory)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_apt_failure_shows_its_last_lines_and_the_log_path(directory: Path) -> None:
    (directory / "broken").touch()
    done = _set_up(directory)
    assert done.returncode == 100
    *words, what, where = done.stderr.splitlines()
    assert words and all(word.startswith("Reading") for word in words)
    assert what.startswith("hvdtrain: exit code 100 of: ") and what.endswith(" update")
    assert where == f"hvdtrain: the complete output is in {directory}/clone/build/set-up.log"
