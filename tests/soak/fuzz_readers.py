"""Fuzz the readers of run directories with files that hypothesis generates.

    python tests/soak/fuzz_readers.py [SECONDS]

A reader must return, or raise an error that is shown in one line. tests/single/test_reader_fuzz.py
runs a few examples of each; this runs them for 10 minutes, and prints the input on which a reader
failed.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
import io
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hvdtrain import cli
from hvdtrain.api.run import Run
from hvdtrain.checkpoint.format import read, read_files_of_ranks
from hvdtrain.checkpoint.layout import MARKER, STATE, SUMS, best, verify
from hvdtrain.checkpoint.spread import open_part, read_part
from hvdtrain.checkpoint.tensor_file import positions_of, unpack
from hvdtrain.checkpoint.weights import read_weights
from hvdtrain.config_files import read_yaml
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import FORMAT, RunState
from hvdtrain.errors import UserError
from hvdtrain.launch.hostfile import parse_hosts, read_hostfile, tasks_per_node
from hvdtrain.report.web import pages
from hvdtrain.report.web.live import LiveRun
from hvdtrain.run_files import owner_token
from hvdtrain.run_files.host_records import (
    DIRECTORY,
    Incident,
    host_key,
    known_incidents,
    summary,
    suspects,
)
from hvdtrain.run_files.listing import runs_under
from hvdtrain.supervise import host_evidence, run_progress
from hvdtrain.telemetry.profile_summary import READY, TRACE, rank_path, timeline_path
from hvdtrain.top.scrape import Rank, read_targets
from hvdtrain.top.screen import RankTable, header, picture, table
from tests.support.history import History

_NOW = int(time.time())  # one value, so that the same draws give the same files
_NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**12, 10**30, 10**400, -(2**63)]),
    st.floats(),
)
_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=12))
VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
_LINE = b"\n"


def altered(value: Any, data: DataObject, depth: int = 0) -> Any:
    """Draw a JSON value with one place replaced, removed or repeated."""
    inner = isinstance(value, dict | list) and len(value) > 0
    if not inner or depth > 4 or data.draw(st.integers(0, 3)) == 0:
        return data.draw(VALUES)
    changed = copy.copy(value)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = data.draw(st.sampled_from(keys))
    what = data.draw(st.sampled_from(["inside"] * 6 + ["remove", "add"]))
    if what == "inside":
        changed[key] = altered(value[key], data, depth + 1)
    elif what == "remove":
        del changed[key]
    elif isinstance(changed, dict):
        changed[data.draw(st.text(max_size=8))] = data.draw(VALUES)
    else:
        changed.append(value[key])
    return changed


def torn(content: bytes, data: DataObject) -> bytes:
    """Draw bytes that a disk or a person has changed, most often none."""
    kind = data.draw(st.sampled_from(["same"] * 4 + ["cut", "byte", "deep", "insert"]))
    at = data.draw(st.integers(0, len(content)))
    if kind == "cut":
        return content[:at]
    if kind == "deep":
        return content[:at] + b"[" * 5000 + content[at:]
    if kind == "insert":
        return content[:at] + data.draw(st.binary(max_size=9)) + content[at:]
    if kind == "byte" and at < len(content):
        return content[:at] + bytes([data.draw(st.integers(0, 255))]) + content[at + 1 :]
    return content


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _altered_file(path: Path, data: DataObject) -> None:
    """Change a line, or the object of a whole file."""
    content = path.read_bytes()
    if path.suffix == ".jsonl":
        lines = content.splitlines()
        for _ in range(data.draw(st.integers(1, 3))):
            number = data.draw(st.integers(0, len(lines) - 1))
            with contextlib.suppress(ValueError):
                lines[number] = _json(altered(json.loads(lines[number]), data))
        content = _LINE.join(lines) + _LINE
    else:
        content = _json(altered(json.loads(content), data))
    path.write_bytes(torn(content, data))


def _history(directory: Path, data: DataObject) -> Path:
    history = History(directory, eval_every=data.draw(st.sampled_from([0, 3])))
    history.launch(2)
    history.steps(data.draw(st.integers(1, 12)))
    if data.draw(st.booleans()):
        history.recover(1)
        history.steps(3)
        history.crash(torn=True)
        history.launch(3)
        history.steps(2)
    history.end(data.draw(st.sampled_from([0, 1, 3, 75])))
    manifest = json.loads((directory / "manifest.json").read_text())
    more = {
        "task": "language_model",
        "world_size": 2,
        "hosts": {"node1": [0, 1]},
        "layout": ["2 ranks = data 1 x tensor 2", "replica 0 on node1: rank 0, rank 1"],
        "coordinates": [{"data": 0, "tensor": 0}, {"data": 0, "tensor": 1}],
        "versions": {"torch": "2.13"},
        "horovod": {"controller": "gloo", "built": {}},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest | more))
    (directory / "config.yaml").write_text("task: language_model\ntrain: {log_every: 1}\n")
    events = [
        {"event": "straggler", "time": 1.7e9, "step": 3, "rank": 1, "host": "n", "phase": "data"}
        | {"score": 0.5, "stage": 0, "ranks": [1]},
        {"event": "straggler_ended", "time": 1.7e9, "step": 4, "rank": 1, "phase": "data"},
        {"event": "deal", "time": 1.7e9, "step": 4, "micro_batches": [1, 2]},
        {"event": "healed", "time": 1.7e9, "step": 4, "ranks": [1]},
        {"event": "replay", "time": 1.7e9, "step": 4, "verdict": "wrong", "hosts": ["n"]},
        {"event": "checkpoint_failed", "time": 1.7e9, "step": 4},
        {"event": "early_stop", "time": 1.7e9, "step": 4},
    ]
    with open(directory / "events.jsonl", "ab") as file:
        file.writelines(_json(event) + _LINE for event in events)
    names = ("data", "forward", "backward", "comm_exposed", "optimizer", "eval", "checkpoint")
    ranks = {
        "step": 10,
        "steps": 10,
        "time": 1.7e9,
        "phases": {name: [0.1, 0.2] for name in (*names, "other")},
        "wall_seconds": [1.0, 1.0],
        "inflight_seconds": [0.2, 0.2],
        "bytes": [8, 8],
        "host_memory_bytes": [100, 100],
        "device_memory_bytes": [0, 0],
        "most_memory_bytes": {"data": 100},
        "collectives": {"mean": {"calls": 1, "bytes": 8, "seconds": 0.1}},
        "bubble_formula": 0.1,
        "tensor_wait_seconds": [0.1, 0.1],
        "schedule_seconds": [0.1, 0.1],
        "score": [1.0, 0.5],
    }
    (directory / "ranks.jsonl").write_bytes((_json(ranks) + _LINE) * 3)
    line = {"time": 1.0, "level": "error", "rank": 0, "host": "node1", "message": "lost"}
    (directory / "logs").mkdir()
    (directory / "logs/rank_00000.jsonl").write_bytes(_json(line) + _LINE)
    token = owner_token.Token("me", 1, 0, "node1", 1, "boot", False)
    owner_token.write(directory / ".owner", token)
    entry = {"targets": ["node1:1"], "labels": {"run": "one", "rank": "0", "host": "node1"}}
    entries = [entry | {"labels": entry["labels"] | {"tp": str(n)}} for n in range(2)]  # type: ignore[operator]
    (directory / "targets.json").write_bytes(_json(entries))
    return directory


_FILES = ("metrics.jsonl", "events.jsonl", "ranks.jsonl", "manifest.json", ".owner", "targets.json")


def run_directory(root: Path, data: DataObject) -> None:
    """Fuzz `ls`, `audit`, `report`, `doctor`, `top`, --serve, `launch` and the API."""
    run = _history(root / "runs/one", data)
    for name in data.draw(st.lists(st.sampled_from(_FILES), min_size=1, max_size=3, unique=True)):
        _altered_file(run / name, data)
    if data.draw(st.integers(0, 4)) == 0:
        _altered_file(run / "logs/rank_00000.jsonl", data)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert cli.main(["ls", str(run.parent)]) == 0
        cli.main(["ls", str(run.parent), "--sort", "loss", "--format", "json"])
        for command in ("audit", "doctor"):
            for form in ("text", "json"):
                cli.main([command, str(run), "--format", form])
        cli.main(["report", str(run), "--format", "json"])
        cli.main(["report", str(run)])
        cli.main(["report", str(run), str(run)])
        cli.main(["audit", "--same", str(run), str(run)])
    list(runs_under(run.parent))
    live = LiveRun(run)
    json.dumps(pages.make({run: live.refresh()}))
    run_progress.newest_step(run)
    run_progress.made_steps(run, 0.0)
    run_progress.last_errors(run, 0.0)
    found = Run(run)
    for look in (lambda: found.columns(), lambda: found.newest(), lambda: found.manifest):
        with contextlib.suppress(UserError):
            look()
    with contextlib.suppress(UserError, FileNotFoundError):
        ranks = [Rank(target) for target in read_targets(run / "targets.json")]
        header(ranks), picture(ranks), table(ranks), RankTable(ranks)


def configuration(root: Path, data: DataObject) -> None:
    """Fuzz the configuration of a run, and of a checkpoint's run."""
    text = (
        "task: &a language_model\nmodel: {vocab_size: null, layers: [1, 2]}\nb: *a\nc: !!set {x}\n"
    )
    pieces = st.sampled_from(
        ["!!int ", "!!bool ", "&b ", "*b", "2024-13-01", "<<: ", "[", "? ", "="]
    )
    path = root / "config.yaml"
    content = text.encode()
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content)))
        content = content[:at] + data.draw(pieces).encode() + content[at:]
    path.write_bytes(torn(content, data))
    with contextlib.suppress(UserError):
        read_yaml(path)


def hosts(root: Path, data: DataObject) -> None:
    """Fuzz a hostfile, a list of hosts and Slurm's tasks per node."""
    words = st.sampled_from(
        ["node1", " slots=", ":", "8", ",", "(x", ")", "#", "\n", "max_slots=2"]
    )
    text = "".join(data.draw(st.lists(words | st.text(max_size=3), max_size=12)))
    (root / "hosts").write_bytes(torn(text.encode("utf-8", "surrogatepass"), data))
    for look in (
        lambda: read_hostfile(str(root / "hosts")),
        lambda: parse_hosts(text),
        lambda: tasks_per_node(text),
    ):
        with contextlib.suppress(UserError):
            look()


def records_of_hosts(root: Path, data: DataObject) -> None:
    """Fuzz records of hosts, and the files from which a supervisor learns of incidents."""
    run, shared, now = root / "run", root / DIRECTORY, _NOW
    for directory in (run / "logs", shared):
        directory.mkdir(parents=True)
    entry = {"host": "node1", "cause": "killed", "time": now - 9, "detail": "signal 9"}
    entries = [entry, entry | {"cause": "gpu"}]
    (shared / "run.json").write_bytes(torn(_json(altered({"incidents": entries}, data)), data))
    event = {"event": "start", "time": now, "hosts": {"node1": [0, 1], "node2": [2]}}
    slow = {"event": "straggler", "time": now, "host": "node1", "phase": "compute", "score": 0.4}
    healed = {"event": "healed", "time": now, "step": 3, "ranks": [2]}
    (run / "events.jsonl").write_bytes(b"\n".join(map(_json, (event, slow, healed))))
    line = {"time": now, "level": "error", "host": "node1", "message": "uncorrectable ECC error"}
    (run / "logs/rank_00000.jsonl").write_bytes(_json(line))
    for path in (run / "events.jsonl", run / "logs/rank_00000.jsonl"):
        _altered_file(path, data)
    hung = b"killed by its watchdog: no progress, no work for 60 s"
    (run / "logs/hang_node1_0.txt").write_bytes(torn(hung, data))
    known = known_incidents(root)
    found = [*host_evidence.in_files(run, 0.0), *host_evidence.of_failure(run, 0.0, "")]
    known |= {Incident(host_key(one.host), one.cause, now, one.detail) for one in found}
    for host in suspects(["node1", "node2"], known, now):
        summary(host, known, now).encode()


def _tensor_file(data: DataObject, pieces: bool) -> bytes:
    header: dict[str, Any] = {
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
    }
    if pieces:
        described = [{"shape": [4, 3], "start": 6}, {"shape": [], "start": 0}]
        if data.draw(st.booleans()):
            described[0] = {"shape": [4, 3], "offsets": [2, 0]}
        if data.draw(st.booleans()):
            described = altered(described, data)
        texts = [json.dumps(one) for one in described] if isinstance(described, list) else ["{"]
        header["__metadata__"] = dict(zip(("a.weight", "b"), texts, strict=False))
    if data.draw(st.booleans()):
        header = altered(header, data)
    text = torn(_json(header), data)
    return torn(len(text).to_bytes(8, "little") + text + bytes(32), data)


def tensors(root: Path, data: DataObject) -> None:
    """Fuzz a file of tensors, and the shard positions in its metadata."""
    content = torch.frombuffer(
        bytearray(_tensor_file(data, True)) or bytearray(1), dtype=torch.uint8
    )
    for look in (unpack, positions_of):
        with contextlib.suppress(ValueError):
            look(content)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2, bias=False)


def checkpoint(root: Path, data: DataObject) -> None:
    """Fuzz a checkpoint whose checksums are valid, or altered themselves."""
    directory = root / "run/checkpoints/step_00000003"
    directory.mkdir(parents=True)
    state: Any = {
        "format": FORMAT,
        **Progress(step=3, samples=30, evaluations=[[3, 0.5]]).state_dict(),
        "identity": {"seed": 1},
    }
    if data.draw(st.booleans()):
        state = altered(state, data)
    files = {
        "model.safetensors": _tensor_file(data, False),
        "optimizer.rank_00000.safetensors": _tensor_file(data, True),
        "optimizer.rank_00001.safetensors": _tensor_file(data, True),
        STATE: torn(_json(state), data),
    }
    sums: Any = {}
    for name, content in files.items():
        (directory / name).write_bytes(content)
        sums[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    if data.draw(st.integers(0, 3)) == 0:
        sums = altered(sums, data)
    listed = torn(_json(sums), data)
    (directory / SUMS).write_bytes(listed)
    (directory / MARKER).write_text(hashlib.sha256(listed).hexdigest())
    (root / "run/config.yaml").write_text("task: language_model\nmodel: {vocab_size: null}\n")

    def load() -> None:
        model = _Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        RunState(model, optimizer, Progress(), {"seed": 1}).load(read(directory))

    def read_all() -> None:
        found = open_part(directory, "optimizer")
        for name in found.names() if found else ():
            found.whole(name), found.range(name, 0, 4)  # type: ignore[union-attr]

    for look in (
        load,
        read_all,
        lambda: verify(directory),
        lambda: read_files_of_ranks(directory, lambda rank: True),
        lambda: read_part(directory, "model"),
        lambda: read_weights(root / "run"),
        lambda: best([directory]),
    ):
        with contextlib.suppress(UserError):
            look()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert cli.main(["ckpt", "list", str(root / "run")]) == 0
        cli.main(["ckpt", "export", str(root / "run"), "--out", str(root / "out")])


def profile(root: Path, data: DataObject) -> None:
    """Fuzz `profile summary`: metrics of ranks, their traces, and Horovod's timeline."""
    directory = root / "run/profile"
    directory.mkdir(parents=True)
    phases = dict.fromkeys(("data", "forward", "backward", "comm_exposed", "optimizer"), 0.1)
    peaks = {"host_peak_bytes": dict.fromkeys(phases, 100), "device_peak_bytes": None}
    call = {"cat": "cpu_op", "name": "mm", "ph": "X", "pid": 1, "tid": 1, "ts": 5.0, "dur": 9.0}
    for rank in range(2):
        figures = {"rank": rank, "host": "node1", "world_size": 2, "steps": [4, 6]}
        figures |= {"phases": phases, "wall_seconds": 1.0, "inflight_seconds": 0.2}
        path = rank_path(directory, rank, "node1", 4, ".json")
        path.write_bytes(_json(figures | peaks | {"device": "cpu"}))
        events: Any = {"traceEvents": [call, call | {"ts": 6.0, "dur": 1.0}]}
        content = _json(altered(events, data) if data.draw(st.booleans()) else events)
        trace = torn(gzip.compress(torn(content, data)), data)
        rank_path(directory, rank, "node1", 4, TRACE).write_bytes(trace)
    _altered_file(directory / "rank_00000_node1.4.json", data)
    named = {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": f"x.{READY}4"}}
    ready = [{"name": str(rank), "ph": "X", "pid": 7, "ts": 10 * rank} for rank in range(2)]
    timeline_path(directory, 4).write_bytes(_json([named, *ready]))
    _altered_file(timeline_path(directory, 4), data)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for form in ("text", "json"):
            cli.main(["profile", "summary", str(root / "run"), "--format", form])


READERS: dict[str, Callable[[Path, DataObject], None]] = {
    look.__name__: look
    for look in (
        run_directory,
        configuration,
        hosts,
        records_of_hosts,
        tensors,
        checkpoint,
        profile,
    )
}


def examine(reader: str, examples: int) -> None:
    """Raise what a reader raised; hypothesis reports the draws."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(data=_data())
    def look(data: DataObject) -> None:
        with tempfile.TemporaryDirectory() as root:
            READERS[reader](Path(root), data)

    look()


def _data() -> SearchStrategy[DataObject]:
    return st.data()


def main(seconds: float) -> int:
    end, failed, rounds = time.monotonic() + seconds, dict[str, str](), 0
    while time.monotonic() < end:
        for reader in READERS:
            try:
                examine(reader, 50)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                found = f"{reader}: {type(error).__name__} at {place.filename}:{place.lineno}"
                if found not in failed:
                    failed[found] = traceback.format_exc()
                    print(failed[found], file=sys.stderr, flush=True)
        rounds += 1
    print(
        f"{rounds} rounds of 50 examples for each of {len(READERS)} readers; {len(failed)} faults"
    )
    for found in failed:
        print(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0))
