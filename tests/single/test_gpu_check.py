"""Exit code and report of `make gpu-check`; the GPU checks themselves do not run here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.horovod_wheel import build
from tests.gpu import check, checks, kit
from tests.gpu.checks import Check, Machine


def _fine(machine: Machine) -> str:
    return f"fine | on {machine.device}"


def _wrong(machine: Machine) -> str:
    raise AssertionError("the loss is 7")


def _hangs(machine: Machine) -> str:
    return machine.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)


def _check(
    looks: list[Callable[[Machine], str]],
    gpus: int,
    seconds: int,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, list[dict[str, Any]]]:
    """Run the checks, without the run on the CPU; return the exit code and the rows before it."""

    @contextmanager
    def trained_on_cpu(machine: Machine) -> Iterator[Callable[[], Path]]:
        (machine.work / "one").mkdir()
        (machine.work / "one" / "metrics.jsonl").write_text('{"loss": 1.0}\n')
        yield lambda: machine.work / "one"

    table = [Check(look.__name__, "it", look) for look in looks]
    monkeypatch.setattr(checks, "CHECKS", [*table, Check("two", "it", _fine, gpus=2)])
    monkeypatch.setattr(Machine, "trained_on_cpu", trained_on_cpu)
    arguments = ["--gpus", str(gpus), "--work", str(path / "work"), "--out", str(path)]
    monkeypatch.setattr(sys, "argv", ["checks", *arguments, "--seconds", str(seconds)])
    code = checks.main()
    return code, json.loads((path / "results.json").read_text())[:-1]


@pytest.mark.parametrize(
    ("looks", "code"), [([_fine, _fine], 0), ([_wrong, _fine], 1), ([_hangs, _fine], 1)]
)
def test_gpu_check_continues_after_a_failed_check(
    looks: list[Callable[[Machine], str]],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, rows = _check(looks, 1, 60, tmp_path, monkeypatch)
    assert found == code
    assert [row["ok"] for row in rows] == [looks[0] is _fine, True, None]
    assert rows[2]["seen"] == "not run: 1 of 2 GPUs here"
    said = capsys.readouterr().out
    assert all(line in said for line in (tmp_path / "table.md").read_text().splitlines()[2:])


def test_gpu_check_begins_no_check_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, rows = _check([_fine], 1, 0, tmp_path, monkeypatch)
    assert (code, rows[0]["seen"]) == (1, "AssertionError: no time left")


@pytest.mark.parametrize(
    ("codes", "gpus", "code"), [((0, 0), 1, 0), ((0, 1), 1, 1), ((0, 0), 0, 2), ((1, 0), 0, 1)]
)
def test_gpu_check_fails_without_gpu(
    codes: tuple[int, int],
    gpus: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = dict(zip(("ops", "table"), codes, strict=True))
    monkeypatch.setattr(check, "run_part", lambda command, log, seconds: parts[log.stem])
    monkeypatch.setattr(check, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(check, "gpus_of_torch", lambda: (gpus, []))
    monkeypatch.setattr(sys, "argv", ["check", "--out", str(tmp_path), "--parts", *parts])
    assert check.main() == code


def test_compilation_uses_all_cores_below_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("MAKEFLAGS", "-w")
    env = check.compiler_environment(["80", "90"])
    monkeypatch.setattr(os, "environ", env)
    assert build._makeflags() == f"-j{len(os.sched_getaffinity(0))}"
    assert env["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"


def test_gpu_kit_requires_training_dependencies_but_not_torch() -> None:
    wanted = kit.requirements()
    names = {line.split(">")[0] for line in wanted}
    assert {"jsonargparse", "docstring-parser", "safetensors", "cffi", "setuptools"} <= names
    assert not names & {"torch", "numpy"}
    assert not any("#" in line for line in wanted)
