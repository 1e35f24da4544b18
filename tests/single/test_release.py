"""A release: one version everywhere, and a complete sdist and wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

import hvdtrain
from tests.support.runs import REPOSITORY

SOURCES = ["LICENSE", "README.md", "pyproject.toml", "setup.cfg", "setup.py"]
VERSION = hvdtrain.__version__
pytestmark = pytest.mark.slow


def call(argv: Sequence[str | Path], cwd: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, argv)), cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with an sdist and the wheel built from it."""
    source = tmp_path_factory.mktemp("release")
    for name in SOURCES:
        shutil.copy(REPOSITORY / name, source)
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY / "hvdtrain", source / "hvdtrain", ignore=leave)
    call([sys.executable, "-m", "build", "--no-isolation"], source)
    return source / "dist"


def test_wheel_contains_exactly_the_package_files(built: Path) -> None:
    (wheel,) = built.glob(f"hvdtrain-{VERSION}-py3-none-any.whl")
    (_,) = built.glob(f"hvdtrain-{VERSION}.tar.gz")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "hvdtrain").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there


def test_description_of_the_wheel_has_no_links_into_the_repository(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    metadata = zipfile.ZipFile(wheel).read(f"hvdtrain-{VERSION}.dist-info/METADATA").decode()
    described = metadata.partition("\n\n")[2]
    assert described.startswith("# hvdtrain") and len(described) > 2000
    links = re.findall(r"\]\(([^)]*)\)", described)
    assert [link for link in links if not link.startswith("https://")] == []


def test_wheel_installs_into_an_empty_environment(built: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    call([sys.executable, "-m", "venv", "--without-pip", empty], tmp_path)
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", empty / "bin/python", "install", "-q"]
    call([*pip, "--no-deps", "--no-index", wheel], tmp_path)
    program = empty / "bin/hvdtrain"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    # Its dependencies are this environment's, found after its own packages.
    (own,) = (empty / "lib").glob("python3*/site-packages")
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (own / "z.pth").write_text("\n".join(libraries))
    where = [empty / "bin/python", "-c", "import hvdtrain; print(hvdtrain.__file__)"]
    assert call(where, tmp_path, env).startswith(str(empty))
    keys = ["--config", "gpt-nano"]  # a preset, and templates: package data
    written = call([program, "deploy", "slurm", "--", *keys], tmp_path, env)
    assert "gpt-nano" in written
    call([program, "deploy", "kubernetes", "--", *keys], tmp_path, env)
    assert (tmp_path / "kubernetes/monitoring/hvdtrain.json").exists()


def test_package_citation_and_changelog_have_one_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    (newest, *_) = re.findall(r"^## (\S+)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert newest in ("Unreleased", VERSION)
    assert "version = attr: hvdtrain.version.__version__" in (REPOSITORY / "setup.cfg").read_text()
