"""TensorBoard, wandb and MLflow receive the metrics; a failing sink does not affect training."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import UserError
from hvdtrain.telemetry.config import TelemetryConfig
from hvdtrain.telemetry.sinks import BackgroundSink, MLflow, check_packages, without_secrets
from tests.support.job import Finished, poll
from tests.support.runs import environment, forked_train, losses, metrics, run

STEPS = 100
LONGEST_STEP_SECONDS, LONGEST_END_SECONDS = 8.0, 45.0
SESAME = "open-sesame-for-nobody-else"
REGRESSION = [
    *("--task", "tests.support.tasks:Regression", "--telemetry.port", "0"),
    *("--batch.global_size", "4", "--batch.micro_size", "1", "--checkpoint.every", "0"),
]


def _all_sinks(directory: Path) -> tuple[list[str], dict[str, str]]:
    """Return flags and environment: files below the directory, no network."""
    flags = ["--telemetry.tensorboard", "true", "--telemetry.wandb_project", "tests"]
    env = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{directory}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    return [*flags, "--telemetry.mlflow_experiment", "tests"], env


# What takes long to import is imported where it is used: each worker imports this file.


def _events(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return events


def _tensorboard(directory: Path) -> list[tuple[int, float]]:
    events = _events(directory)
    return [(event.step, event.value) for event in events.Scalars("loss")]


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after wandb's 7-byte header, without a
    torn end."""
    block, place, parts = 32768, 7, b""
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        size, kind = struct.unpack("<4xHB", content[place : place + 7])
        if kind == 0 or place + 7 + size > len(content):
            return
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


def _wandb(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the records of each offline run by ID, in order of their start."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        curve = found.setdefault(path.stem.removeprefix("run-"), [])
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if not record.HasField("history"):
                continue
            values = {i.key or ".".join(i.nested_key): i.value_json for i in record.history.item}
            curve.append((int(values["_step"]), float(values["loss"])))
    return found


def _mlflow(root: Path) -> tuple[str, list[tuple[int, float]]]:
    """Return (status, curve) of the only run, from the files of MLflow's store."""
    files = list(root.glob("mlruns/*/*/metrics/loss"))
    if not files:
        return "", []
    from mlflow.entities import RunStatus

    (file,) = files
    lines = [line.split() for line in file.read_text().splitlines()]
    meta = (file.parents[1] / "meta.yaml").read_text()
    (status,) = (line.split()[1] for line in meta.splitlines() if line.startswith("status:"))
    return RunStatus.to_string(int(status)), [(int(step), float(value)) for _, value, step in lines]


def _run(root: Path, flags: list[str], env: Mapping[str, str], launcher: str = "") -> Finished:
    arguments = [*flags, "--run.root", str(root), "--run.id", "run"]
    return run(root / "output", arguments, launcher, env=env, timeout=90)


def _curve(directory: Path) -> list[tuple[int, float]]:
    return [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in metrics(directory)]


def test_sinks_have_the_curve_of_the_run_once_after_a_resume(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    flags, env = _all_sinks(tmp_path)
    flags += [*REGRESSION, "--task", "tests.support.tasks:Paced", "--train.duration", str(STEPS)]
    flags += ["--batch.micro_size", "2"]
    flags += ["--checkpoint.every", "5", "--run.root", str(tmp_path), "--run.id", "run"]
    slow = environment(env | {"HVDTRAIN_TEST_PACE": "0.05"})
    command = [*forked_train(1), *flags]
    with subprocess.Popen(command, env=slow, stderr=subprocess.DEVNULL) as first:
        poll(lambda: len(_mlflow(tmp_path)[1]) > 12, 60, "metrics in MLflow")
        poll(lambda: len([*_wandb(directory).values(), []][0]) > 12, 60, "metrics in wandb")
        first.kill()
    wandb_id = (directory / "wandb.id").read_text()
    done = run(tmp_path / "output", flags, env=env | {"HVDTRAIN_TEST_PACE": "0"})
    assert done.returncode == 0, done
    begin = json.loads((directory / "manifest.json").read_text())["starts"][-1]["step"]
    expected = _curve(directory)
    assert begin >= 10 and [step for step, _ in expected] == list(range(1, STEPS + 1))
    # Data that the first process had not saved was lost: there may be a gap before `begin`.
    status, curve = _mlflow(tmp_path)
    assert status == "FINISHED" and list(_wandb(directory)) == [wandb_id]
    for found in (curve, _tensorboard(directory), _wandb(directory)[wandb_id][begin - STEPS :]):
        steps = [step for step, _ in found]
        assert len(set(steps)) == len(steps), "a step twice"
        assert set(steps) >= set(range(begin + 1, STEPS + 1))
        assert all(value == dict(expected)[step] for step, value in found)
    assert "metrics.jsonl has all" not in done.stderr and "wandb:" not in done.stderr, done


def test_sinks_receive_every_metric_of_metrics_jsonl(tmp_path: Path) -> None:
    flags, env = _all_sinks(tmp_path)
    done = _run(tmp_path, [*REGRESSION, *flags, "--train.duration", "4", "--eval.every", "2"], env)
    assert done.returncode == 0, done
    lines = metrics(tmp_path / "run")
    names = {key for line in lines for key in line} - {"step", "time", "state_hash", "generation"}
    events = _events(tmp_path / "run")
    assert set(events.Tags()["scalars"]) == names and "validation_loss" in names
    assert [e.step for e in events.Scalars("validation_loss")] == [2, 4]
    assert events.Scalars("loss")[0].wall_time == pytest.approx(lines[0]["time"], abs=0.01)
    (directory,) = tmp_path.glob("mlruns/*/*/metrics")
    assert {path.name for path in directory.iterdir()} == names | {"step"}


def test_failing_sink_is_reported_once_and_training_continues(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").write_text("no directory")
    flags, env = _all_sinks(tmp_path)
    env |= {
        "MLFLOW_TRACKING_URI": f"http://user:{SESAME}@127.0.0.1:9",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": SESAME,  # too short for a key
    }
    done = _run(tmp_path, [*REGRESSION, *flags, "--train.duration", "30"], env)
    assert done.returncode == 0, done
    for name in ("tensorboard", "mlflow", "wandb"):
        assert done.stderr.count(f"warning: {name} ") == 1, done
    assert len(losses(tmp_path / "run")) == 30
    logs = "".join(path.read_text() for path in tmp_path.glob("run/logs/*.jsonl"))
    assert "mlflow failed" in logs and SESAME not in logs
    assert SESAME not in done.stderr + done.stdout, done


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# Only the longest has more metrics than a sink keeps; how a process ends is its launcher's matter.
@pytest.mark.parametrize(
    ("launcher", "steps"), [("", 1100), pytest.param("mpirun:2", 30, marks=pytest.mark.soak)]
)
def test_hanging_sink_does_not_block_steps_or_the_end(
    tmp_path: Path, silent_server: str, launcher: str, steps: int
) -> None:
    flags, env = _all_sinks(tmp_path)
    env |= {
        "MLFLOW_TRACKING_URI": silent_server,
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": silent_server,
        "WANDB_API_KEY": "0123456789" * 4,
    }
    flags = [*REGRESSION, *flags, "--train.duration", str(steps), "--eval.every", "0"]
    done = _run(tmp_path, flags, env, launcher)
    ended = time.time()
    assert done.returncode == 0, done
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    # A step or an end that waits for the server would take 90 s (wandb) or 120 s (MLflow).
    times = [line["time"] for line in lines]
    assert max(after - before for before, after in pairwise(times)) < LONGEST_STEP_SECONDS
    assert ended - times[-1] < LONGEST_END_SECONDS, "25 s for the sinks, and the process's end"
    for name in ("mlflow", "wandb"):
        full = done.stderr.count(f"{name} accepts no lines: it misses metrics from step 1001 on")
        assert full == (steps > 1000), done
        assert done.stderr.count(f"{name} did not accept its last metrics in time") == 1, done
    assert len(_tensorboard(tmp_path / "run")) == steps, "another sink hangs with them"
    assert json.loads((tmp_path / "run/manifest.json").read_text())
    events = (tmp_path / "run/events.jsonl").read_text()
    assert '"event": "end"' in events and '"exit_code": 0' in events


def test_hanging_sink_does_not_change_the_exit_code(tmp_path: Path, silent_server: str) -> None:
    env = {"MLFLOW_TRACKING_URI": silent_server, "HVDTRAIN_TEST_NAN": "2-"}
    flags = [*REGRESSION, "--task", "tests.support.tasks:NotFinite"]
    flags += ["--train.max_nonfinite", "3", "--telemetry.mlflow_experiment", "tests"]
    done = _run(tmp_path, flags, env)
    assert done.returncode == 3 and "not finite in 3 steps in a row" in done.stderr, done
    assert "mlflow did not accept its last metrics in time" in done.stderr, done


class Blocked:
    """A sink whose writes wait."""

    name, module = "blocked", "json"

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.steps: list[int] = []
        self.exit_code: int | None = None

    def open(self, after: int) -> None:
        pass

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        self.go_on.wait(30)
        self.steps.append(step)

    def close(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_queue_of_a_blocked_sink_is_bounded_and_written_later() -> None:
    blocked = Blocked()
    sink = BackgroundSink(blocked)
    sink.start(0)
    begin = time.monotonic()
    for step in range(1, 5001):
        sink.write({"step": step, "time": 0.0, "loss": 1.0})
    assert time.monotonic() - begin < 5
    blocked.go_on.set()
    poll(lambda: len(blocked.steps) >= 1000, 10, "the lines that waited")
    sink.write({"step": 5001, "time": 0.0, "loss": 1.0})
    sink.close(75)
    sink.wait(time.monotonic() + 10)
    assert not sink.stuck and blocked.exit_code == 75
    assert len(blocked.steps) <= 1002 and blocked.steps[-1] == 5001


def test_sinks_receive_only_finite_numbers() -> None:
    seen: list[Any] = []

    class Seen(Blocked):
        def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
            seen.append((step, at, dict(metrics)))

    sink = BackgroundSink(Seen())
    sink.start(0)
    odd = {"grad_norm": float("nan"), "healed": [1], "skipped": True, "host": "node1"}
    sink.write({"step": 3, "time": 5.0, "loss": 1, **odd})
    sink.close(0)
    sink.wait(time.monotonic() + 10)
    assert seen == [(3, 5.0, {"loss": 1.0})]


def test_end_waits_for_the_import_of_a_sinks_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Blocked):
        module = "late_module"

    (tmp_path / "late_module.py").write_text("import time; time.sleep(1)")
    monkeypatch.syspath_prepend(str(tmp_path))
    late = Late()
    late.go_on.set()
    sink = BackgroundSink(late)
    sink.start(0)
    sink.write({"step": 1, "time": 5.0, "loss": 1})
    sink.close(0)
    sink.wait_for_import(time.monotonic() + 20)
    sink.wait(time.monotonic() + 0.5)
    assert late.steps == [1] and not sink.stuck


def test_missing_sink_package_is_reported_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # the directory of an offline run is not a package
    site = [path for path in sys.path if "packages" not in path]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *site])
    for name in ("wandb", "mlflow", "tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for config, package in (
        (TelemetryConfig(tensorboard=True), "tensorboard"),
        (TelemetryConfig(wandb_project="p"), "wandb"),
        (TelemetryConfig(mlflow_experiment="e"), "mlflow"),
    ):
        with pytest.raises(UserError, match=rf"pip install 'hvdtrain\[{package}\]'"):
            check_packages(config)
    check_packages(TelemetryConfig())


def test_messages_contain_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", SESAME)
    text = f"POST http://me:pass@host:5000/api\nfailed with key {SESAME}: " + "x" * 1000
    shown = without_secrets(text)
    assert "pass" not in shown and SESAME not in shown and "\n" not in shown
    assert shown.startswith("POST http://host:5000/api failed with key ***: x")
    assert len(shown) < 400


def test_resumed_run_continues_its_mlflow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in _all_sinks(tmp_path)[1].items():
        monkeypatch.setenv(key, value)
    for exit_code, steps in ((75, (1, 2, 3)), (0, (2, 3, 4))):
        sink = MLflow("tests", tmp_path)
        sink.open(0)
        for step in steps:
            sink.write(step, 1.0, {"loss": float(step)})
        sink.close(exit_code)
        assert _mlflow(tmp_path)[0] == ("KILLED" if exit_code else "FINISHED")
    assert _mlflow(tmp_path)[1] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
