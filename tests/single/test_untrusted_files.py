"""Hostile content of a shared directory: links, pipes, escape sequences, wrong JSON."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.api.run import Run
from hvdtrain.checkpoint.format import read
from hvdtrain.checkpoint.layout import MARKER, STATE, SUMS, DamagedError, best, verify
from hvdtrain.doctor import host_facts
from hvdtrain.errors import UserError
from hvdtrain.files import write_atomic
from hvdtrain.launch.hostfile import read_hostfile
from hvdtrain.report.web.runs import Runs
from hvdtrain.run_files import owner_token
from hvdtrain.run_files.listing import runs_under
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.top.scrape import read_targets
from tests.support.history import TOTAL, History

OTHER, THIRD = 4242, 4243  # users that are not root
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def _run(root: Path, name: str = "one") -> RunDirectory:
    directory = RunDirectory(root / name)
    directory.path.mkdir(parents=True)
    directory.targets.write_text("[]")
    return directory


def _links(where: Path, name: str, victim: Path) -> None:
    """Place links like an attacker who knows the ID of this process or of a later one."""
    for process in range(os.getpid() - 1, os.getpid() + 200):
        (where / f".{name}.{process}.tmp").symlink_to(victim)


def test_writes_do_not_follow_symbolic_links(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    _links(tmp_path, "file", victim)
    (tmp_path / "file").symlink_to(victim)
    write_atomic(tmp_path / "file", b"new")
    assert victim.read_text() == "precious"
    assert (tmp_path / "file").read_text() == "new" and not (tmp_path / "file").is_symlink()
    (tmp_path / ".owner").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        owner_token.write(tmp_path / ".owner", owner_token.Token("me", 1, 0, "h", 1, "b", False))
    assert victim.read_text() == "precious"


def test_doctor_does_not_write_its_test_file_through_links(tmp_path: Path) -> None:
    victim, root = tmp_path / "victim", tmp_path / "runs"
    victim.write_text("precious")
    root.mkdir()
    for process in range(os.getpid() - 1, os.getpid() + 200):
        (root / f".doctor-{os.uname().nodename}-{process}").symlink_to(victim)
    assert host_facts.directory(str(root))["failed"] == ""
    assert victim.read_text() == "precious"


@as_root
@pytest.mark.parametrize(
    ("owner", "mode", "written"),
    [(OTHER, 0o755, True), (0, 0o777, True), (THIRD, 0o777, False), (THIRD, 0o1777, True)],
)
def test_targets_are_listed_only_in_a_trusted_directory(
    tmp_path: Path, owner: int, mode: int, written: bool
) -> None:
    """Written by OTHER; a shared directory belongs to root, or has the sticky bit."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.name.startswith(("test_", "popen-", "pytest-")):
            parent.chmod(0o755)
    directory = _run(tmp_path / "runs")
    shared = directory.listed_targets.parent
    shared.mkdir()
    for path, user in ((directory.path.parent, 0), (directory.path, OTHER), (shared, owner)):
        os.chown(path, user, user)
    shared.chmod(mode)
    code = f"""
import os
from pathlib import Path
from hvdtrain.log import logger, to_screen
from hvdtrain.run_files.run_directory import RunDirectory
os.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER})
to_screen(None)
RunDirectory(Path({str(directory.path)!r})).list_targets()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert directory.listed_targets.exists() == written, done.stderr
    assert ("belongs to another user (uid 4243)" in done.stderr) == (not written)
    assert [path.name for path in shared.iterdir()] == (["one.json"] if written else [])


def test_targets_are_not_listed_or_removed_through_a_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, elsewhere = _run(tmp_path / "runs"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "one.json").write_text("precious")
    directory.listed_targets.parent.symlink_to(elsewhere)
    directory.list_targets()
    directory.remove_targets()
    assert (elsewhere / "one.json").read_text() == "precious"
    assert "is not written (the directory is a link" in caplog.text


NAMES = (".owner", ".launch.owner", "metrics.jsonl", "events.jsonl", "manifest.json", "config.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_pipe_in_place_of_a_file_does_not_block_readers(tmp_path: Path, name: str) -> None:
    root = tmp_path / "runs"
    _history(root / "whole")
    History(root / "piped").launch(1)
    (root / "piped" / name).unlink(missing_ok=True)
    os.mkfifo(root / "piped" / name)
    code = f"""
import sys
from contextlib import suppress
from pathlib import Path
from hvdtrain import cli
from hvdtrain.errors import UserError
from hvdtrain.report.web.runs import Runs
from hvdtrain.top.scrape import read_targets
root = Path({str(root)!r})
assert cli.main(["ls", str(root)]) == 0
assert "whole" in [row["name"] for row in Runs(root).rows()]
for command in ("audit", "doctor", "report"):
    cli.main([command, str(root / "piped")])
with suppress(UserError, FileNotFoundError):
    read_targets(root / "piped" / {name!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_huge_sparse_file_is_not_read_into_memory(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    _history(root / "one")
    for name in ("manifest.json", ".owner", "config.yaml"):
        with open(root / "one" / name, "wb") as file:
            file.truncate(1 << 40)
    (run,) = runs_under(root)
    assert run.state != "running"
    with pytest.raises(UserError, match="more than"):
        _ = Run(root / "one").manifest
    (row,) = Runs(root).rows()
    assert "more than" in row["state"]


def _history(directory: Path, code: int = 0) -> History:
    history = History(directory)
    history.launch(2)
    history.steps(TOTAL)
    history.end(code)
    (directory / "config.yaml").write_text("train: {log_every: 1}\n")
    return history


def test_control_characters_in_names_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    run = _history(root / f"run{ESCAPE}", code=1).directory
    text = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(text.replace("node1", json.dumps(ESCAPE)[1:-1]))
    (run / "checkpoints" / f"step_00000007{ESCAPE}").mkdir()
    line = {"time": 1.0, "level": "error", "rank": 0, "host": ESCAPE, "message": f"RANK {ESCAPE}"}
    (run / "logs").mkdir()
    (run / "logs/rank_00000.jsonl").write_text(json.dumps(line) + "\n")
    commands = (
        ["ls", str(root)],
        ["audit", str(run)],
        ["ckpt", "list", str(run)],
        ["ckpt", "verify", str(run)],
        ["doctor", str(run)],
        ["audit", str(root / f"none{ESCAPE}")],
    )
    for command in commands:
        cli.main(command)
        shown = capsys.readouterr()
        assert r"\x1b" in shown.out + shown.err, command
        assert "\x1b" not in shown.out + shown.err, command
    entry = {"targets": [f"{ESCAPE}:1"], "labels": {"run": ESCAPE, "rank": "0", "host": ESCAPE}}
    (tmp_path / "targets.json").write_text(json.dumps([entry]))
    (target,) = read_targets(tmp_path / "targets.json")
    assert all("\x1b" not in text for text in (target.address, target.run, target.host))


WRONG: list[Any] = ["text", None, True, [], {}, [[]], 10**400, -1, float("inf")]
FIELDS = ("time", "loss", "step", "world_size", "samples", "step_seconds", "validation_loss")


@pytest.mark.parametrize("name", FIELDS)
def test_commands_tolerate_malformed_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for number, value in enumerate(WRONG):
        run = _history(tmp_path / "runs" / f"run{number}").directory
        line = {"step": 61, "samples": 610, "world_size": 2, "step_seconds": 1.0, "time": 1e9}
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps({**line, name: value}) + "\n")
        with open(run / "events.jsonl", "a") as file:
            file.write(json.dumps({"event": "start", "time": value, "total_steps": value}) + "\n")
        for command in (["audit", str(run)], ["doctor", str(run)]):
            assert cli.main(command) in (0, 1, 2)
        Run(run).columns()
        Run(run).newest()
    capsys.readouterr()
    for options in ([], ["--sort", "loss"], ["--format", "json"]):
        assert cli.main(["ls", str(tmp_path / "runs"), *options]) == 0
    assert capsys.readouterr().out.count("run") >= 3 * len(WRONG)
    assert len(Runs(tmp_path / "runs").rows()) == len(WRONG)


def _sealed(directory: Path, files: dict[str, bytes]) -> Path:
    """Write a checkpoint with valid checksums."""
    directory.mkdir(parents=True)
    sums = {}
    for name, content in files.items():
        (directory / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        sums[name] = {"bytes": len(content), "sha256": digest}
    return _marked(directory, json.dumps(sums).encode())


def _marked(directory: Path, sums: bytes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SUMS).write_bytes(sums)
    (directory / MARKER).write_text(hashlib.sha256(sums).hexdigest())
    return directory


def _file(header: Any, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


DEEP = b"[" * 100_000
GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TENSORS: dict[str, bytes] = {
    "deep": _file(DEEP),
    "list": _file([1]),
    "no header": b"\xff" * 8,
    "short": b"\x01",
    "entry": _file({"a": 7}),
    "dtype": _file({"a": {**GOOD, "dtype": ["F32"]}}),
    "offsets": _file({"a": {**GOOD, "data_offsets": [2**70, 2**71]}}),
    "negative": _file({"a": {**GOOD, "data_offsets": [-8, 0]}}),
    "three": _file({"a": {**GOOD, "data_offsets": [0, 4, 8]}}),
    "shape": _file({"a": {**GOOD, "shape": [2**70, 0], "data_offsets": [0, 0]}}),
    "text": _file({"a": {**GOOD, "shape": "2"}}),
    "metadata": _file({"__metadata__": {"a": 7}, "a": GOOD}),
}
STATES = {"deep": DEEP, "list": b"[1]", "no step": b"{}", "text": b'{"step": "x"}', "torn": b"{"}
LISTS = {
    "deep": DEEP,
    "list": b"[1]",
    "entry": b'{"state.json": 7}',
    "bytes": b'{"state.json": {"bytes": "x", "sha256": 1}}',
    "outside": b'{"../../secret": {"bytes": 1, "sha256": "x"}}',
}


@pytest.mark.parametrize("kind", ["tensors", "state", "sums"])
def test_hostile_checkpoint_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    found = []
    if kind == "tensors":
        for name, content in TENSORS.items():
            files = {"model.safetensors": content, STATE: b'{"step": 1, "samples": 1}'}
            found.append(_sealed(tmp_path / name / "checkpoints/step_00000001", files))
    elif kind == "state":
        for name, content in STATES.items():
            files = {"model.safetensors": _file({"a": GOOD}), STATE: content}
            found.append(_sealed(tmp_path / name / "checkpoints/step_00000001", files))
    else:
        for name, content in LISTS.items():
            found.append(_marked(tmp_path / name / "checkpoints/step_00000001", content))
    for directory in found:
        if kind != "tensors" or directory.parent.parent.name != "metadata":
            with pytest.raises(DamagedError, match=str(directory)):
                read(directory)
        if kind == "sums":
            with pytest.raises(DamagedError, match=str(directory)):
                verify(directory)
        best([directory])
        run = directory.parent.parent
        (run / "config.yaml").write_text("task: language_model\nmodel: {vocab_size: null}\n")
        assert cli.main(["ckpt", "list", str(run)]) == 0
        assert cli.main(["ckpt", "export", str(run), "--out", str(run / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("hvdtrain: error:") == len(found) and "Traceback" not in said


YAML = {
    "deep": "[" * 5000,
    "long": "a: b\n" * 1_000_000,
    "itself": "&a {b: *a}",
    "bomb": "a0: &a0 [x, x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 13)),
    "bool": "a: !!bool x",
    "date": "a: 2024-99-99",
    "stamp": "a: !!timestamp x",
    "number": "a: !!int ''",
    "text": "'x'",
    "bytes": "\udc80",
}


@pytest.mark.parametrize("name", YAML)
def test_hostile_configuration_is_a_user_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = _history(tmp_path / "run").directory
    (run / "config.yaml").write_bytes(YAML[name].encode("utf-8", "surrogateescape"))
    began = time.monotonic()
    with pytest.raises(UserError, match=r"config\.yaml"):
        _ = Run(run).config
    assert cli.main(["report", str(run), "--format", "json"]) == 0
    assert "config.yaml is missing or damaged" in capsys.readouterr().out
    assert cli.main(["train", "--config", str(run / "config.yaml")]) == 2
    assert cli.main(["ckpt", "export", str(run), "--out", str(run / "out")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert time.monotonic() - began < 60


def test_invalid_slot_count_names_its_line(tmp_path: Path) -> None:
    for text in ("node1 slots=" + "9" * 5000, "node1:²", "node1 slots=٣"):
        (tmp_path / "hosts").write_text(text)
        with pytest.raises(UserError, match="line 1"):
            read_hostfile(str(tmp_path / "hosts"))
