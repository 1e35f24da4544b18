"""`hvdtrain.run` and `hvdtrain.Run`: start and read runs from notebooks and scripts."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import hvdtrain
from hvdtrain.api import start
from hvdtrain.checkpoint.spread import read_part
from hvdtrain.errors import UserError
from tests.support import runs, tasks
from tests.support.job import poll
from tests.support.runs import REPOSITORY

RECORDED = REPOSITORY / "tests/data/recorded"
SCRIPT = """\
import sys
import hvdtrain
root = sys.argv[1]
hvdtrain.run("tests.support.tasks:Paced", np=2, config={
    "run.root": root, "run.id": "mine", "telemetry.port": 0, "train": {"log_every": 1}})
"""


class Inherited(tasks.Regression):
    class Inner(tasks.Regression):
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Argv and environment of launchers that the test begins; each exits with 0."""
    calls: list[tuple[list[str], dict[str, str]]] = []

    class Launcher:
        def __init__(self, argv: list[str], env: dict[str, str], directory: str) -> None:
            calls.append((argv, env))

        def poll(self) -> int:
            return 0

        def last_lines(self) -> list[str]:
            return []

    monkeypatch.setattr(start, "Launcher", Launcher)
    return calls


def test_importing_hvdtrain_loads_no_heavy_modules() -> None:
    code = "import sys, hvdtrain; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "hvdtrain" in loaded
    assert not loaded & {"torch", "numpy", "pandas", "yaml", "jsonargparse", "hvdtrain.api"}


def test_no_module_has_the_name_of_a_public_function_or_class() -> None:
    # Python would bind hvdtrain.NAME to the module as soon as that is imported.
    modules = {module.name for module in pkgutil.iter_modules(hvdtrain.__path__)}
    assert not modules & {*hvdtrain.__all__}


def test_run_passes_its_arguments_to_the_launcher(
    started: list[tuple[list[str], dict[str, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config: dict[str, Any] = {"run": {"id": "mine"}, "optim": {"lr": 0.1}, "run.init_from": None}
    config["train.duration"] = np.int64(3)  # as a parameter sweep may compute it
    ranks: Any = np.int64(3)
    result = hvdtrain.run(
        tasks.Regression, np=ranks, hosts="a:2,b:1", config=config, max_restarts=2
    )
    assert result == hvdtrain.RunResult(tmp_path / "runs/mine", {}, 0)
    ((argv, env),) = started
    launch, train = (" ".join(part) for part in (argv[: argv.index("--")], argv))
    assert launch.endswith("launch --hosts a:2,b:1 --min-np 3 --max-np 3 --max-restarts 2")
    assert "-m hvdtrain.train --task=tests.support.tasks:Regression --run.id=mine" in train
    assert "--optim.lr=0.1 --run.init_from=null --train.duration=3" in train
    assert train.endswith(f"--run.root={tmp_path}/runs --run.id=mine")
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(REPOSITORY)


def test_runs_without_id_get_distinct_directories_under_the_files_root(
    started: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(f"run:\n  root: {tmp_path}/somewhere\n")
    results = [hvdtrain.run(str(tmp_path / "mine.yaml")) for _ in range(3)]
    first = results[0].directory
    assert first.parent == tmp_path / "somewhere" and first.name.endswith("-mine")
    assert len({result.directory for result in results}) == 3, "started in one second"
    assert "--hosts localhost:1" in " ".join(started[0][0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hvdtrain.run(type("Own", (), {"__module__": "__main__"})), "put it into a file"),
        (lambda: hvdtrain.run(Inherited.Inner), "Inner is defined inside a function or class"),
        (lambda: hvdtrain.run("__main__:Own"), "Own is defined in this notebook or script"),
        (lambda: hvdtrain.run("gpt-nan"), "did you mean gpt-nano?"),
        (lambda: hvdtrain.run("xyzzy"), "there are digits, gpt-1b3"),
        (lambda: hvdtrain.run(3), "a name or a class is expected, not 3"),  # type: ignore[arg-type]
        (lambda: hvdtrain.run("image", np=0), "np is the number of ranks"),
        (lambda: hvdtrain.Run("nowhere"), "nowhere is not a run directory: it has no config.yaml"),
    ],
)
def test_invalid_call_raises_a_one_line_error(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("?", r"\?")) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_run_called_inside_a_rank_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (word,) = start._environment(None)  # argv of a rank
    monkeypatch.setenv(*word.split("="))
    with pytest.raises(UserError, match="__name__ == '__main__'"):
        hvdtrain.run("gpt-nano")


def test_run_files_are_readable_with_and_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    run = hvdtrain.Run(RECORDED)
    assert list(run.checkpoints) == [6, 12] and run.checkpoints[12].name == "step_00000012"
    assert run.events[-1]["exit_code"] == 0 and run.manifest["world_size"] == 2
    assert run.config["task"] == "language_model"
    with_pandas = run.metrics
    monkeypatch.setitem(sys.modules, "pandas", None)
    without = run.metrics
    assert with_pandas["loss"].to_list() == without["loss"] and len(without["loss"]) == 12
    assert without["validation_loss"][:2] == [None, None] and without["validation_loss"][2] > 5
    assert run.newest()["validation_loss"] == without["validation_loss"][-1]


def test_model_is_loaded_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "copy"  # without its training data
    shutil.copytree(RECORDED, directory)
    (directory / "checkpoints/step_00000012/complete").unlink()
    model = hvdtrain.Run(directory).model()
    saved = read_part(directory / "checkpoints/step_00000006", "model")
    assert not model.training
    for name, tensor in model.state_dict().items():
        if name in saved:
            torch.testing.assert_close(tensor, saved[name], rtol=0, atol=0)
    for checkpoint in directory.glob("checkpoints/*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(UserError, match="no finished checkpoint"):
        hvdtrain.Run(directory).model()


@pytest.mark.slow
def test_unknown_key_raises_and_creates_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"unknown key train\.durations .* did you mean train\.duration\?"
    ):
        hvdtrain.run("image", config={"train.durations": 3, "run.root": tmp_path})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)]
)
def test_interrupted_notebook_leaves_no_ranks_running(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path)]
    job = runs.start(tmp_path, [], command=command)
    metrics = tmp_path / "mine/metrics.jsonl"
    poll(metrics.exists, 120, "the first step")
    job.send(number)
    done = job.wait(60)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in done.stderr
        assert not _processes_of(tmp_path)  # the script has waited for the end of both
    poll(lambda: not _processes_of(tmp_path), 60, "the end of all ranks")


def _processes_of(root: Path) -> list[list[str]]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
    return [command for command in found if any(str(root) in word for word in command)]
