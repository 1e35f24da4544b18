"""hvdtrain in a directory that holds files with the names of Python's modules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job import Job
from tests.support.runs import REPOSITORY, TINY, environment, losses

# Such as a file with keys, or with helpers for random numbers.
NAMES = ("secrets", "queue", "signal", "random", "tempfile")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the directory')\n")
    return tmp_path


def test_directory_comes_after_pythons_modules_and_before_installed_ones(directory: Path) -> None:
    (directory / "yaml.py").write_text("raise SystemExit('found in the directory')\n")
    argv = [sys.executable, "-m", "hvdtrain.cli", "train", "--task", "yaml:Task"]
    done = subprocess.run(
        argv, cwd=directory, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stderr == "found in the directory\n"


@pytest.mark.parametrize("module", ["agent", "elastic.watchdog", "supervise.successor"])
def test_own_program_finds_installed_modules_before_the_directory(
    directory: Path, module: str
) -> None:
    names = ("psutil", "yaml", "horovod", "numpy")
    for name in names:
        (directory / f"{name}.py").write_text("raise SystemExit('found in the directory')\n")
    argv = [sys.executable, "-m", f"hvdtrain.{module}"]
    done = subprocess.run(
        argv,
        cwd=directory,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "directory" not in done.stderr, "it ends because it has no arguments"


def test_module_of_a_project_keeps_pythons_order(directory: Path) -> None:
    (directory / "project.py").write_text("import hvdtrain, json, sys; print(json.dumps(sys.path))")
    argv = [sys.executable, "-m", "project"]
    env = environment()
    done = subprocess.run(argv, cwd=directory, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[:2] == [str(directory), str(REPOSITORY)]


@pytest.mark.slow
def test_launch_in_a_directory_with_names_of_pythons_modules_trains(directory: Path) -> None:
    flags = ["--train.duration", "2", "--run.root", str(directory), "--run.id", "run"]
    program = str(Path(sys.executable).with_name("hvdtrain"))
    argv = [program, "launch", "--slots", "1", "--", *TINY, *flags]
    done = Job(["env", "-C", str(directory)], argv, environment(), directory / "job").wait(120)
    assert done.returncode == 0, done
    assert len(losses(directory / "run")) == 2
