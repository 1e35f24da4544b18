"""A script that starts hvdtrain under horovodrun's elastic launcher, on this machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from textwrap import indent

import pytest

from tests.support import warm
from tests.support.job import Finished, Job
from tests.support.own_loops import PRELOAD, SHORT_LOOP
from tests.support.runs import REPOSITORY, TINY, environment, forked_train

pytestmark = pytest.mark.slow


# There may be no GPU here: each process reports the same one.
SAME_GPU = """
from hvdtrain.process import session
from hvdtrain.tasks.language_model import LanguageModel

session.gpu_of = lambda device: "node1 GPU-1"


class Task(LanguageModel):
    pass
"""


LOOP = "def main():\n" + indent(SHORT_LOOP, "    ")


def _run_script(directory: Path, env: dict[str, str], *more: str) -> Finished:
    script = directory / "script.sh"
    script.write_text(f"exec {shlex.join([*forked_train(2), *TINY, *more, *_keys(directory)])}\n")
    return _run(directory, ["sh", str(script)], env)


def _keys(directory: Path) -> list[str]:
    return ["--train.duration", "3", "--run.root", str(directory), "--run.id", "case"]


def _run(directory: Path, command: list[str], env: dict[str, str]) -> Finished:
    (directory / "hosts").write_text("localhost:2\n")
    # Horovod's own driver waits for a second host if no interface is given.
    launcher = shlex.split(
        "horovodrun --gloo -np 2 --min-np 2 --max-np 2 --network-interfaces lo"
        f" --host-discovery-script 'cat {directory}/hosts'"
    )
    argv = [*launcher, *command]
    return Job([], argv, environment(env), directory / "job").wait(120)


def test_script_under_horovods_own_driver_fails_with_a_hint(tmp_path: Path) -> None:
    done = _run_script(tmp_path, {})
    assert "HVDTRAIN_ELASTIC=1" in done.stderr, done
    assert "hvdtrain: Horovod's own elastic driver starts this command" in done.stderr, done
    assert "Traceback" not in done.stderr and done.returncode != 0, done


def test_script_that_imports_its_loop_gets_hvdtrains_driver(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("from loop import main\n\nmain()\n")
    (tmp_path / "loop.py").write_text(LOOP)
    keys = ["--batch.global_size", "8", "--telemetry.port", "0", *_keys(tmp_path)]
    command = [warm.python(2, PRELOAD), str(tmp_path / "main.py"), *keys]
    done = _run(tmp_path, command, {})
    assert done.returncode == 0, done
    assert (tmp_path / "case" / "metrics.jsonl").read_text().count("\n") == 3


def test_script_can_request_hvdtrains_driver(tmp_path: Path) -> None:
    done = _run_script(tmp_path, {"HVDTRAIN_ELASTIC": "1"})
    assert done.returncode == 0, done
    assert (tmp_path / "case" / "metrics.jsonl").read_text().count("\n") == 3


def test_elastic_run_on_one_host_needs_no_discovery_script(tmp_path: Path) -> None:
    launcher = shlex.split("horovodrun -np 2 --min-np 1 --network-interfaces lo")
    argv = [*launcher, *forked_train(2), *TINY, *_keys(tmp_path)]
    done = Job([], argv, environment({}), tmp_path / "job").wait(120)
    assert done.returncode == 0, done
    assert (tmp_path / "case" / "metrics.jsonl").read_text().count("\n") == 3


def test_horovods_own_driver_is_refused_on_one_host(tmp_path: Path) -> None:
    argv = shlex.split("horovodrun -np 2 --min-np 1 --network-interfaces lo echo hello")
    done = Job([], argv, environment({}), tmp_path / "job").wait(60)
    assert done.returncode == 1 and "hello" not in done.stdout, done
    assert "Cannot run in fault tolerance mode with fewer than 2 hosts" in done.stderr, done


def test_elastic_run_whose_processes_share_a_gpu_is_refused(tmp_path: Path) -> None:
    (tmp_path / "same_gpu.py").write_text(SAME_GPU)
    env = {"HVDTRAIN_ELASTIC": "1", "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    done = _run_script(tmp_path, env, "--task", "same_gpu:Task")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert "the GPU here (node1 GPU-1) is the GPU of rank 0 on" in done.stderr, done
