"""A script that starts hvdtrain under horovodrun's elastic launcher, on this machine."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.job import Finished, Job
from tests.support.runs import TINY, environment, forked_train

pytestmark = pytest.mark.slow


def _run_script(directory: Path, env: dict[str, str]) -> Finished:
    keys = [*TINY, "--train.duration", "3", "--run.root", str(directory), "--run.id", "case"]
    script = directory / "script.sh"
    script.write_text(f"exec {shlex.join([*forked_train(2), *keys])}\n")
    (directory / "hosts").write_text("localhost:2\n")
    # Horovod's own driver waits for a second host if no interface is given.
    launcher = shlex.split(
        "horovodrun --gloo -np 2 --min-np 2 --max-np 2 --network-interfaces lo"
        f" --host-discovery-script 'cat {directory}/hosts'"
    )
    argv = [*launcher, "sh", str(script)]
    return Job([], argv, environment(env), directory / "job").wait(120)


def test_script_under_horovods_own_driver_fails_with_a_hint(tmp_path: Path) -> None:
    done = _run_script(tmp_path, {})
    assert "HVDTRAIN_ELASTIC=1" in done.stderr, done
    assert "Traceback" not in done.stderr and done.returncode != 0, done


def test_script_can_request_hvdtrains_driver(tmp_path: Path) -> None:
    done = _run_script(tmp_path, {"HVDTRAIN_ELASTIC": "1"})
    assert done.returncode == 0, done
    assert (tmp_path / "case" / "metrics.jsonl").read_text().count("\n") == 3
