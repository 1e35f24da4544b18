"""`hvdtrain ls`: states of the runs in a directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.run_files import listing, owner_token
from hvdtrain.run_files.listing import runs_under

START = {"event": "start", "total_steps": 60, "world_size": 4}


def _made(
    root: Path, name: str, events: list[dict[str, Any]], metrics: list[dict[str, Any]], age: float
) -> Path:
    """Make a run whose newest line has this age in seconds."""
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "config.yaml").touch()
    for file, lines in (("events.jsonl", events), ("metrics.jsonl", metrics)):
        lines = [{"time": time.time() - age, **line} for line in lines]
        (directory / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def _line(step: int, loss: float = 0.5) -> dict[str, Any]:
    return {"step": step, "loss": loss, "world_size": 3}


def _own(directory: Path, name: str = ".owner", ended: bool = False) -> Path:
    token = owner_token.Token("me", 1, 0, "host", 1, "boot", False, ended=ended)
    owner_token.write(directory / name, token)
    return directory / name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of each state."""
    root = tmp_path / "runs"
    end = {"event": "end", "exit_code": 0}
    saved = {"event": "checkpoint", "step": 5}
    _own(_made(root, "going", [START, saved], [_line(7, 0.25)], 3))
    _own(_made(root, "between", [START, end | {"exit_code": 1}], [_line(8)], 4), ".launch.owner")
    _own(_made(root, "done", [START, saved, end], [_line(60, 0.125)], 7200), ended=True)
    _made(root, "asked", [START, end | {"exit_code": 75}], [_line(30)], 200)
    _made(root, "diverged", [START, end | {"exit_code": 3}], [_line(9, float("nan"))], 300)
    _made(root, "crashed", [START, end | {"exit_code": 1}], [_line(10)], 400)
    token = _own(_made(root, "shot", [START, end, START, saved], [_line(11)], 500))
    os.utime(token, (time.time() - 90_000, time.time() - 90_000))
    old = _made(root, "old", [], [_line(12)], 600)
    (old / "events.jsonl").unlink()
    _own(_made(root, "young", [], [], 0))
    (root / "young/metrics.jsonl").write_text('{"step": 1, "lo')  # torn
    (root / "no-run").mkdir()
    (root / ".targets").mkdir()
    return root


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert cli.main(["ls", *arguments, "--format", "json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_run_states_are_classified(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {run["id"]: run for run in _json(capsys, str(root))}
    assert {name: run["state"] for name, run in found.items()} == {
        "going": "running",
        "between": "restarting",
        "done": "finished",
        "asked": "stopped",
        "diverged": "not finite",
        "crashed": "failed",
        "shot": "killed",
        "old": "unknown",
        "young": "running",
    }
    going, young = found["going"], found["young"]
    assert [going[name] for name in ("step", "steps", "loss", "ranks")] == [7, 60, 0.25, 3]
    assert 2 < going["age"] < 30
    assert young["step"] is young["age"] is None
    assert found["diverged"]["loss"] is None  # JSON has no NaN
    assert found["old"]["steps"] is None and found["old"]["ranks"] == 3


@pytest.mark.parametrize(
    ("column", "first", "last"),
    [("age", "young", "going"), ("step", "young", "done"), ("loss", "diverged", "crashed")],
)
def test_runs_are_sorted_by_column(
    root: Path, capsys: pytest.CaptureFixture[str], column: str, first: str, last: str
) -> None:
    names = [run["id"] for run in _json(capsys, str(root), "--sort", column)]
    if column == "loss":
        names.remove("young")  # unknown, like the other
        names = names[: names.index("crashed") + 1]
    assert (names[0], names[-1]) == (first, last)


def test_table_lists_all_runs_and_columns(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    assert cli.main(["ls"]) == 0  # run.root is runs by default
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["id", "state", "step", "loss", "ranks", "age"] and len(lines) == 9
    (done,) = [line.split() for line in lines if line.startswith("done")]
    assert done == ["done", "finished", "60/60", "0.1250", "3", "2", "h"]
    (young,) = [line.split() for line in lines if line.startswith("young")]
    assert young == ["young", "running", "-", "-", "-", "-"]


@pytest.mark.parametrize("ahead", [45.0, -45.0, 7200.0])
def test_run_is_alive_if_its_heartbeats_change_whatever_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    # This host's clock is that many seconds ahead of the file server's.
    monkeypatch.setattr(listing, "_WATCH_SECONDS", 1.0)
    token = owner_token.Token("me", 1, 0, "host", 1, "boot", False)
    ended = threading.Event()

    def write(path: Path, beats: int) -> None:
        owner_token.write(path, replace(token, beats=beats))
        os.utime(path, (time.time() - ahead,) * 2)

    def beat() -> None:
        for beats in count(1):
            write(tmp_path / "trains" / ".owner", beats)
            if ended.wait(0.05):
                return

    for name in ("trains", "killed"):
        write(_made(tmp_path, name, [START], [_line(7)], 3) / ".owner", 0)
    beating = threading.Thread(target=beat)
    beating.start()
    try:
        states = {run.id: run.state for run in runs_under(tmp_path)}
    finally:
        ended.set()
        beating.join()
    assert states == {"trains": "running", "killed": "killed"}


def test_missing_directory_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "nowhere"]) == 2
    assert "nowhere: No such file or directory" in capsys.readouterr().err


def test_ls_reads_only_end_of_long_metrics_file(tmp_path: Path) -> None:
    directory = _made(tmp_path, "long", [START], [], 0)
    with open(directory / "metrics.jsonl", "r+b") as file:
        file.seek(1 << 30)  # needs no space
        file.write(b"\n" + json.dumps(_line(9)).encode() + b"\n")
    tracemalloc.start()
    try:
        (run,) = runs_under(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert replace(run, age=None).step == 9
    assert peak < 4 << 20


def test_long_killed_run_is_reported_as_killed(tmp_path: Path) -> None:
    saved = [{"event": "checkpoint", "step": step} for step in range(20_000)]
    _made(tmp_path, "long", [START, *saved], [_line(20_000)], 500)
    (run,) = runs_under(tmp_path)
    assert (run.state, run.steps) == ("killed", 60)


def test_ls_imports_neither_torch_nor_configuration_parser(root: Path) -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "hvdtrain.cli", "ls", str(root)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "jsonargparse", "yaml"}
