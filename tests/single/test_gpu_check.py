"""Exit code and report of `make gpu-check`; the GPU checks themselves do not run here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import checks, kit
from tests.gpu.checks import Check, Machine


def _fine(machine: Machine) -> str:
    return f"fine | on {machine.device}"


def _wrong(machine: Machine) -> str:
    raise AssertionError("the loss is 7")


def _hangs(machine: Machine) -> str:
    return machine.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)


@pytest.mark.parametrize(
    ("looks", "gpus", "code"),
    [
        ([_fine, _fine], 1, 0),
        ([_wrong, _fine], 1, 1),
        ([_hangs, _fine], 0, 1),
        ([_fine, _fine], 0, 2),
    ],
)
def test_gpu_check_runs_all_checks_and_fails_without_gpu(
    looks: list[Callable[[Machine], str]],
    gpus: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = [Check(look.__name__, "it", look) for look in looks]
    monkeypatch.setattr(checks, "CHECKS", [*table, Check("two", "it", _fine, gpus=2)])
    arguments = ["--gpus", str(gpus), "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["checks", *arguments])
    assert checks.main() == code
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["ok"] for row in rows] == [looks[0] is _fine, True, None]
    assert rows[2]["seen"] == f"not run: {gpus} of 2 GPUs here"
    said = capsys.readouterr().out
    assert ("no GPU here" in said) == (code == 2)
    assert (tmp_path / "table.md").read_text() in said


def test_gpu_kit_requires_training_dependencies_but_not_torch() -> None:
    wanted = kit.requirements()
    names = {line.split(">")[0] for line in wanted}
    assert {"jsonargparse", "docstring-parser", "safetensors", "cffi", "setuptools"} <= names
    assert not names & {"torch", "numpy"}
    assert not any("#" in line for line in wanted)
