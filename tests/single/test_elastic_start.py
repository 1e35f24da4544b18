"""A script that starts hvdtrain under horovodrun's elastic launcher, on this machine."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.job import Finished, Job
from tests.support.runs import REPOSITORY, TINY, environment, forked_train

pytestmark = pytest.mark.slow


# There may be no GPU here: each process reports the same one.
SAME_GPU = """
from hvdtrain.run import start_checks
from hvdtrain.tasks.language_model import LanguageModel

start_checks.gpu_of = lambda device: "node1 GPU-1"


class Task(LanguageModel):
    pass
"""


def _run_script(directory: Path, env: dict[str, str], *more: str) -> Finished:
    keys = [*TINY, *more, "--train.duration", "3", "--run.root", str(directory), "--run.id", "case"]
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


def test_elastic_run_whose_processes_share_a_gpu_is_refused(tmp_path: Path) -> None:
    (tmp_path / "same_gpu.py").write_text(SAME_GPU)
    env = {"HVDTRAIN_ELASTIC": "1", "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    done = _run_script(tmp_path, env, "--task", "same_gpu:Task")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert "the GPU here (node1 GPU-1) is the GPU of rank 0 on" in done.stderr, done
