"""docs/tutorial.md: its commands in order, in one directory, and the output that it shows."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvdtrain.audit.report import audit
from tests.support import warm
from tests.support.job import Finished, Job
from tests.support.runs import REPOSITORY, environment, losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = REPOSITORY / "docs/tutorial.md"
SERVE = "hvdtrain report --serve"


def _blocks() -> list[tuple[str, str]]:
    """Return (language, content) of each block of the page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert {language for language, _ in found} == {"bash", "yaml", "text"}
    return found


@pytest.fixture
def env(tmp_path: Path) -> Mapping[str, str]:
    """As after the activation of the environment; `python -m` forks its process, see warm.py."""
    directory = tmp_path / "bin"
    directory.mkdir()
    python = directory / "python"
    forked = f'[ "$1" = -m ] && exec {warm.python(2)} "$@"'
    python.write_text(f'#!/bin/sh\n{forked}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    path = f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    slots = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
    return environment({"PATH": path, **root, **slots})


def _run(script: str, directory: Path, env: Mapping[str, str]) -> Finished:
    argv = ["bash", "-e", "-o", "pipefail", "-c", f"cd {directory}\n{script}"]
    job = Job([], argv, env, directory / "job")
    try:
        if SERVE in script:
            job.wait_for("until Ctrl-C", 60)
            os.killpg(job.pid, signal.SIGINT)
        done = job.wait(300)
    finally:
        job.kill()
    assert done.returncode == 0, done
    return done


def test_tutorial_commands_run_and_print_the_output_it_shows(
    tmp_path: Path, env: Mapping[str, str]
) -> None:
    blocks = [content for language, content in _blocks() if language == "yaml"]
    (tmp_path / "tutorial.yaml").write_text("".join(blocks))
    said = ""
    pending = ""
    for language, content in _blocks():
        if language == "text":
            for line in content.splitlines():
                pattern = line.replace("...", "*")
                assert fnmatch.filter(said.splitlines(), pattern), f"{line!r} not in {said}"
        elif content.rstrip().endswith("&"):
            pending = content  # in one shell with the block that waits for it
        elif language == "bash":
            done = _run(pending + content, tmp_path, env)
            said, pending = done.stdout + done.stderr, ""
    _check(tmp_path / "runs", tmp_path)


def _check(runs: Path, directory: Path) -> None:
    """Check the results that the page states."""
    first, two, three = (losses(runs / name)[:60] for name in ("first", "two", "three"))
    assert two == pytest.approx(first, rel=1e-4) and three == pytest.approx(first, rel=1e-4)
    assert len(losses(runs / "first")) == 80 and len(losses(runs / "supervised")) == 60
    elastic = audit(runs / "elastic")
    assert elastic.clean and len(losses(runs / "elastic")) == 120
    events = (runs / "elastic/events.jsonl").read_text().splitlines()
    starts = [event for event in map(json.loads, events) if event["event"] == "start"]
    assert "failure" in [start["cause"] for start in starts]
    for made in ("first/report.html", "two/compare.html", "../model/model.safetensors"):
        assert (runs / made).stat().st_size > 1000, made
    assert "#SBATCH" in (directory / "train.sbatch").read_text()
