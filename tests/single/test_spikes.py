"""Loss spikes: which losses are spikes, and runs that skip them or return to a checkpoint."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from hvdtrain import cli
from hvdtrain.audit.report import audit
from hvdtrain.checkpoint.format import read
from hvdtrain.config import Config
from hvdtrain.data.order import sample_order
from hvdtrain.engine.config import SpikeConfig
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.spikes import exceeds, loss_limit, passed_over, rolled_back
from hvdtrain.process.exporting import Exported, build_exporter
from hvdtrain.runtime.memory import PeakMemory
from hvdtrain.runtime.mesh import key_of_degree
from hvdtrain.runtime.phases import PhaseTimer
from hvdtrain.telemetry.config import TelemetryConfig
from tests.support import warm
from tests.support.job import Finished, Job
from tests.support.runs import (
    REPOSITORY,
    TINY,
    environment,
    forked_train,
    losses,
    metrics,
    run,
    start,
    weights,
)
from tests.support.tasks import Spiking

TASK = ["--task", "tests.support.tasks:Spiking"]
EXACT = ["--exchange.name", "exact", "--runtime.threads", "1"]
LAST = 40
# Global batches of the order with outliers. With rollback the second one is met in step 22.
SPIKES = "15,27"

_losses = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


# --- decisions ----------------------------------------------------------------


@given(st.lists(_losses, min_size=2, max_size=30), st.floats(1.1, 50), _losses, st.floats(0.1, 10))
def test_limit_follows_the_shift_and_the_scale_of_the_losses(
    losses: list[float], factor: float, shift: float, scale: float
) -> None:
    config = SpikeConfig("skip", len(losses), factor)
    limit = loss_limit(config, losses)
    moved = loss_limit(config, [scale * loss + shift for loss in losses])
    if limit is None:
        assert 2 * max(map(losses.count, losses)) > len(losses)
        return
    assert limit == loss_limit(config, sorted(losses))
    assert sum(loss < limit for loss in losses) * 2 >= len(losses)
    assert moved == pytest.approx(scale * limit + shift, rel=1e-6, abs=1e-3 * factor)
    assert loss_limit(config, losses[1:]) is None, "the window is not full"
    assert loss_limit(SpikeConfig("none", len(losses), factor), losses) is None


def test_a_loss_is_a_spike_only_above_the_limit() -> None:
    limit = loss_limit(SpikeConfig("skip", 5, 4), [-1.0, -2.0, -3.0, -4.0, -5.0])
    assert limit == pytest.approx(-3 + 4 * 1.4826)
    spikes = {loss: exceeds(loss, limit) for loss in (-1e9, limit, 3.0, float("inf"))}
    assert [*spikes.values()] == [False, False, True, True]
    assert exceeds(float("nan"), limit) and not exceeds(float("nan"), None)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), max_size=12))
def test_rollbacks_use_each_batch_at_most_once(plan: list[tuple[int, int]]) -> None:
    """Each entry: steps to the next spike, and how many checkpoints are damaged then."""
    rollbacks: list[list[int]] = []
    step, position = 0, 0
    used: list[int] = []  # batch of each step of the newest state
    saved = [0]
    for steps, damaged in plan:
        for _ in range(steps):
            used.append(position)
            step, position = step + 1, position + 1
            if step % 7 == 0 and step not in saved:
                saved.append(step)
        before = [to for to in saved if to < step]
        to = before[max(0, len(before) - 1 - damaged)]
        rollbacks = rolled_back(rollbacks, to, step)
        step, used, saved = to, used[:to], [one for one in saved if one <= to]
        assert step + passed_over(rollbacks) == position, "the next batch is the one after"
        assert all(batches > 0 for _, _, batches in rollbacks)
        passed: list[int] = []
        for at, _, batches in rollbacks:
            first = at + len(passed)
            passed += range(first, first + batches)
        assert sorted([*passed, *used]) == [*range(position)]


# --- runs ---------------------------------------------------------------------


def _run(
    root: Path,
    name: str,
    action: str,
    launcher: str = "",
    *more: str,
    spikes: str = SPIKES,
    code: int = 0,
) -> Finished:
    flags = [*TASK, "--train.spike.action", action, "--run.root", str(root), "--run.id", name]
    env = {"HVDTRAIN_TEST_SPIKES": spikes}
    done = run(root / f"output-{name}", [*flags, *more], launcher, env)
    assert done.returncode == code, done
    return done


def _curve(directory: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "samples", "skipped", "spike")
    return [tuple(line.get(name) for name in names) for line in metrics(directory)]


def _starts(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "start"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each action on one rank; `skip` saves a checkpoint after each step."""
    root = tmp_path_factory.mktemp("runs")
    saved = ["--task", "tests.support.tasks:SpikingSaved", "--checkpoint.every", "1"]
    _run(root, "skip", "skip", "", *EXACT, *saved)
    _run(root, "rollback", "rollback", "", *EXACT)
    return root


def test_skipped_spike_leaves_parameters_and_buffers_bitwise(root: Path) -> None:
    found = audit(root / "skip")
    assert found.clean and found.lineage.spikes == [15, 27] and not found.lineage.skipped
    assert "  skipped because of a loss spike: steps [15, 27]" in found.to_text()
    for step in found.lineage.spikes:
        before, after, following = (
            read(root / f"skip/checkpoints/step_{number:08}")
            for number in range(step - 1, step + 2)
        )
        for part, tensors in before.parts.items():
            assert all(torch.equal(t, after.parts[part][name]) for name, t in tensors.items())
        changed = following.parts["model"]
        assert any(not torch.equal(t, changed[name]) for name, t in after.parts["model"].items())
        assert before.state["losses"] == after.state["losses"] != following.state["losses"]
    assert [row[0] for row in _curve(root / "skip") if row[3]] == [15, 27]


# Three ranks with rollback: see test_rollback_keeps_the_curve_through_killed_ranks.
@pytest.mark.parametrize(("action", "launcher"), [("skip", "gloo:3"), ("rollback", "mpirun:2")])
def test_spikes_leave_the_curve_independent_of_ranks_and_stops(
    root: Path, action: str, launcher: str
) -> None:
    name = f"{action}-{launcher[-1]}"
    # The run ends in the middle of a window, just before the second spike, and is resumed.
    _run(root, name, action, "", *EXACT, "--train.duration", "21")
    _run(root, name, action, launcher, *EXACT)
    assert _curve(root / name) == _curve(root / action)
    assert weights(root / name, LAST) == weights(root / action, LAST)
    assert cli.main(["audit", str(root / name)]) == 0


def test_rollback_with_sharded_optimizer_keeps_the_curve(root: Path) -> None:
    _run(root, "zero", "rollback", "gloo:2", *EXACT, "--parallel.shard.stage", "1")
    assert _curve(root / "zero") == _curve(root / "rollback")


def test_rollback_equals_a_plain_loop_without_the_samples(tmp_path: Path) -> None:
    whole = ["--batch.micro_size", "8", "--optim.name", "sgd", "--optim.momentum", "0"]
    whole += ["--optim.clip_norm", "0", "--optim.weight_decay", "0"]
    _run(tmp_path, "run", "rollback", "", *whole)
    task, model = Spiking(), Spiking().model()
    model.load_state_dict(read(tmp_path / "run/checkpoints/step_00000010").parts["model"])
    rows, batches = task.datasets().train, [*range(15, 25), *range(27, 47)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        samples = sample_order(batch * 8, (batch + 1) * 8, 1024, 1234)
        loss = task.loss(model, torch.stack([rows[i] for i in samples]))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [line["loss"] for line in metrics(tmp_path / "run")][10:] == losses
    saved = read(tmp_path / "run/checkpoints/step_00000040").parts["model"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_audit_names_the_samples_of_a_rollback(root: Path) -> None:
    found = audit(root / "rollback")
    assert found.clean and not found.lineage.findings
    text = found.to_text()
    for spike, to, first, last in ((15, 10, 80, 119), (22, 20, 200, 215)):
        assert (
            f"  loss spike at step {spike}: rolled back to step {to}; samples {first} to {last} "
            "of the order are passed over"
        ) in text
    assert json.loads(found.to_json())["rollbacks"] == [
        {"to": 10, "spike": 15, "batches": 5, "first_sample": 80, "last_sample": 119},
        {"to": 20, "spike": 22, "batches": 2, "first_sample": 200, "last_sample": 215},
    ]
    start = _starts(root / "rollback")[1]
    assert (start["cause"], start["step"], start["samples"]) == ("spike", 10, 120)
    assert start["spike"]["loss"] > start["spike"]["limit"]


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (1, {"rollbacks": [[10, 15, 4]]}),
        (2, {"rollbacks": [[10, 15, 5]]}),
        (2, {"rollbacks": [[10, 15, 5], [19, 22, 2]]}),
        (2, {"rollbacks": [[20, 22, 7]]}),
        (1, {"spike": {"step": 12, "loss": 9.0, "limit": 1.0}}),
        (2, {"samples": 208}),
    ],
)
def test_audit_finds_wrong_declarations_of_rollbacks(
    root: Path, tmp_path: Path, number: int, change: dict[str, Any]
) -> None:
    shutil.copytree(root / "rollback", tmp_path / "run")
    events = [json.loads(li) for li in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    starts = [event for event in events if event["event"] == "start"]
    starts[number] |= change
    (tmp_path / "run/events.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in events))
    kinds = {finding.kind for finding in audit(tmp_path / "run").lineage.findings}
    assert "samples" in kinds


def test_report_shows_skipped_spikes_and_rollbacks(root: Path) -> None:
    pages = {}
    for name in ("skip", "rollback"):
        assert cli.main(["report", str(root / name)]) == 0
        pages[name] = (root / name / "report.html").read_text()
    assert "2 steps skipped because of a loss spike." in pages["skip"]
    assert "skipped: loss spike" in pages["skip"], "the plot's legend"
    assert "2 times the run returned to a checkpoint because of a loss spike." in pages["rollback"]
    assert "a loss spike (state from checkpoint)" in pages["rollback"]


def test_spike_without_a_checkpoint_is_skipped_with_a_message(tmp_path: Path) -> None:
    done = _run(tmp_path, "run", "rollback", "gloo:2", "--train.spike.window", "5", spikes="9,13")
    assert done.stderr.count("step 9: there is no checkpoint") == 1, done
    assert [row[0] for row in _curve(tmp_path / "run") if row[3]] == [9]
    found = audit(tmp_path / "run")
    assert found.clean and found.lineage.spikes == [9], found.to_text()
    assert _starts(tmp_path / "run")[-1]["rollbacks"] == [[10, 13, 3]]


def test_repeated_rollbacks_to_one_checkpoint_exit_with_3(tmp_path: Path) -> None:
    done = _run(tmp_path, "run", "rollback", "gloo:2", spikes="12,14,15,16", code=3)
    message = done.stderr.strip().splitlines()[-1]
    assert "the run has returned to the checkpoint of step 10 3 times already" in message
    assert done.stderr.count("hvdtrain: error:") == 1 and "Traceback" not in done.stderr
    assert _starts(tmp_path / "run")[-1]["rollbacks"] == [[10, 12, 2], [10, 12, 2], [10, 11, 1]]
    assert audit(tmp_path / "run").clean


def test_persistent_spikes_become_the_new_level(tmp_path: Path) -> None:
    spikes = ",".join(map(str, range(25, LAST + 1)))
    done = _run(tmp_path, "run", "skip", "", "--train.spike.window", "20", spikes=spikes)
    assert [row[0] for row in _curve(tmp_path / "run") if row[3]] == [25, 26]
    assert "step 27: loss" in done.stderr and "2 spikes in a row: applied as a new level" in (
        done.stderr
    ), done
    state = read(tmp_path / f"run/checkpoints/step_{LAST:08}").state
    assert (len(state["losses"]), state["spikes"], state["spikes_in_a_row"]) == (14, 2, 0)


def test_exporter_counts_spikes() -> None:
    config = Config()
    config.telemetry = TelemetryConfig(port=1, host="127.0.0.1")
    exchange: Any = SimpleNamespace(
        inflight_seconds=1.0, bytes=1, parameters=[], state_parts=lambda: []
    )
    cpu, timer = torch.device("cpu"), PhaseTimer(0.0)
    exported = Exported(exchange, timer, PeakMemory(cpu, timer), progress=Progress(spikes=3))
    exporter = build_exporter(config, 0, cpu, exported)
    assert exporter is not None
    try:
        assert b"\nhvdtrain_loss_spikes_total 3.0\n" in generate_latest(exporter.registry)
    finally:
        exporter.close()


@pytest.mark.slow
def test_rollback_keeps_the_curve_through_killed_ranks(root: Path) -> None:
    """One rank is killed in the step of the spike, and another one in the middle of a rollback."""
    (root / "hosts").write_text("localhost:3\n")
    launcher = shlex.split(
        "horovodrun --gloo -np 3 --min-np 1 --max-np 3 --network-interfaces lo"
        f" --host-discovery-script 'cat {root}/hosts'"
    )
    flags = ["--train.spike.action", "rollback", "--run.root", str(root), "--run.id", "killed"]
    # Rank 2 has one micro-batch per step.
    kills = {"HVDTRAIN_TEST_SPIKES": SPIKES, "HVDTRAIN_TEST_KILL": "2:15,1:rollback"}
    command = [*launcher, *forked_train(3), *TASK, *EXACT, *flags]
    done = Job([], command, environment(kills), root / "killed-job").wait(120)
    assert done.returncode == 0, done
    assert _curve(root / "killed") == _curve(root / "rollback")
    assert weights(root / "killed", LAST) == weights(root / "rollback", LAST)
    found = audit(root / "killed")
    assert found.clean, found.to_text()
    causes = [start["cause"] for start in _starts(root / "killed")]
    assert causes.count("failure") >= 2 and "spike" in causes, causes


# Noise is a spike here, so that these runs return to checkpoints.
_NOISE = [
    *("--train.spike.action", "rollback", "--train.spike.window", "2"),
    *("--train.spike.factor", "1.01", "--checkpoint.every", "1", "--telemetry.port", "0"),
]
_MODEL = [*TINY, "--model.layers", "2", "--optim.lr", "0.1", "--schedule.warmup_steps", "1"]


def _noisy(root: Path, name: str, launcher: str, flags: list[str], command: list[str]) -> Path:
    where = ["--run.root", str(root), "--run.id", name]
    done = start(root / f"output-{name}", [*flags, *_NOISE, *where], launcher, {}, command).wait(90)
    assert done.returncode == 0, done
    found = audit(root / name)
    assert found.clean and found.lineage.unused, found.to_text()
    return root / name


def _steps(directory: Path) -> list[tuple[int, int]]:
    return [(line["step"], line["samples"]) for line in metrics(directory)]


def test_script_with_its_own_loop_returns_to_a_checkpoint(tmp_path: Path) -> None:
    script = str(REPOSITORY / "tests/support/scripts/regression.py")
    flags = [
        *EXACT,
        "--train.duration",
        "8",
        "--batch.global_size",
        "12",
        "--batch.micro_size",
        "2",
    ]
    one, two = (
        _noisy(tmp_path, f"{ranks}", f"gloo:{ranks}", flags, [warm.python(ranks), script])
        for ranks in (1, 2)
    )
    assert _curve(one) == _curve(two) and len(_curve(one)) == 8


@pytest.mark.soak
@pytest.mark.parametrize(
    "flags",
    [
        ["--task", "tests.support.ragged:Ragged", "--optim.lr", "0.0001"],
        ["--task", "tests.support.unusual:Streamed", "--train.duration", "8", *TINY[-8:]],
    ],
)
def test_rollback_suits_buckets_and_iterable_data(tmp_path: Path, flags: list[str]) -> None:
    one, two = (
        _noisy(tmp_path, f"{ranks}", f"gloo:{ranks}", [*flags, *EXACT], forked_train(ranks))
        for ranks in (1, 2)
    )
    assert _curve(one) == _curve(two)


@pytest.mark.soak
def test_rollback_suits_models_that_span_ranks(tmp_path: Path) -> None:
    flags = [*_MODEL, "--train.duration", "12"]
    one = _noisy(tmp_path, "one", "", flags, forked_train(1))
    for axis in ("tensor", "pipeline", "shard"):
        own = [*flags, f"--{key_of_degree(axis)}", "2"]
        two = _noisy(tmp_path, axis, "gloo:2", own, forked_train(2))
        assert _steps(two) == _steps(one)
        assert losses(two) == pytest.approx(losses(one), rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train.spike.action skp", "expected one of 'none', 'skip', 'rollback', not skp"),
        ("--train.spike.window 1", "train.spike.window must be >= 2, not 1"),
        ("--train.spike.factor 1", "train.spike.factor must be > 1, not 1.0"),
        ("--train.spike.wndow 5", "did you mean train.spike.window?"),
        ("--train.spike.action rollback --checkpoint.every 0", "requires checkpoints"),
        ("--train.spike.action rollback --exchange.sync_every 4", "exchange.sync_every 4 excludes"),
    ],
)
def test_wrong_spike_configuration_is_reported_once(
    flags: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *flags.split()]) == 2
    said = capfd.readouterr().err
    assert said.count("hvdtrain: error:") == 1 and message in said and "Traceback" not in said
