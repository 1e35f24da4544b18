"""`hvdtrain bench`: each benchmark runs and prints its metrics; their values are not checked."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.bench import benchmarks, processes
from hvdtrain.bench.elastic import Recovery, recovered
from hvdtrain.bench.jobs import ControlledJob, cpu_per_step, median_range, take_turns
from hvdtrain.bench.plain import PlainLoop
from hvdtrain.bench.processes import BenchError
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.cli import main
from hvdtrain.config import parse
from tests.support import warm
from tests.support.tasks import Regression

pytestmark = pytest.mark.slow
Bench = Callable[..., subprocess.CompletedProcess[str]]
TINY = ["--model.layers=1", "--model.width=16", "--model.context=16", "--batch.global_size=8"]


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain.cli", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork measured processes, see warm.py."""
    monkeypatch.setattr(
        benchmarks, "worker", lambda *given: [warm.python(2), *processes.worker(*given)[1:]]
    )


def _bench_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["bench", *arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def _metrics(
    action: str, *arguments: str, more: Sequence[str] = (), bench: Bench = _bench
) -> tuple[dict[str, Any], dict[str, Any]]:
    done = bench(action, "--steps", "1", *arguments, "--format", "json", "--", *TINY, *more)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["benchmark"] == action
    assert report["machine"]["cores"] >= 1
    for metric in report["figures"]:
        assert set(metric) == {"name", "unit", "median", "min", "max", "aim", "met"}
        assert 0 < metric["min"] <= metric["median"] <= metric["max"]
        assert (metric["aim"] is None) == (metric["met"] is None)
    return report, {metric["name"]: metric for metric in report["figures"]}


@pytest.mark.usefixtures("warm_workers")
def test_overhead_bench_weights_match_plain_loop_bitwise() -> None:
    report, metrics = _metrics("overhead", "--rounds", "2", bench=_bench_here)
    assert report["bit_identical"] is True
    assert metrics["hvdtrain / plain PyTorch loop"]["aim"] == "<= 1.02"


@pytest.mark.usefixtures("warm_workers")
def test_overhead_bench_compares_weighted_losses_bitwise(tmp_path: Path) -> None:
    preset = tmp_path / "weighted.yaml"
    preset.write_text("task: tests.support.unusual:Weighted\nbatch: {global_size: 8}\n")
    arguments = ("--preset", str(preset), "--steps", "1", "--rounds", "2", "--format", "json")
    done = _bench_here("overhead", *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bit_identical"] is True


class _Watched(Regression):
    """Records on which devices its model and batches are, and in which precision it computes."""

    def __init__(self) -> None:
        self.seen = set[tuple[torch.device, torch.dtype]]()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        output = model(batch[:, :-1])
        self.seen |= {(batch.device, output.dtype), (output.device, output.dtype)}
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float32", torch.float32), ("bf16", torch.bfloat16), ("bf16-params", torch.bfloat16)],
)
def test_plain_loop_trains_on_the_given_device_and_precision(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    # Tensors without values stand for those of a GPU; torch autocasts only on real devices.
    device = torch.device("meta" if name == "float32" else "cpu")
    monkeypatch.setattr(Tensor, "__float__", lambda tensor: 0.0)
    task, flags = _Watched(), ["--train.duration", "2", "--precision.name", name]
    loop = PlainLoop(task, task.datasets().train, parse(flags).config, device)
    loop.run(2)
    assert task.seen == {(device, dtype)}
    kept = torch.bfloat16 if name == "bf16-params" else torch.float32
    assert {p.dtype for p in loop.model.parameters()} == {kept}


@pytest.mark.soak
@pytest.mark.usefixtures("warm_workers")
def test_scaling_bench_measures_every_contender() -> None:
    _, metrics = _metrics("scaling", "--rounds", "1", bench=_bench_here)
    for name in ("2 ranks, horovodrun --gloo", "2 ranks, mpirun"):
        assert metrics[f"{name}: efficiency"]["aim"] == ">= 90"
        assert metrics[f"{name} / torch DDP"]["aim"] == ">= 1"
    assert metrics["2 ranks, no exchange"]["unit"] == "samples/s"


_ENVIRONMENT = """
import os, sys
from pathlib import Path
from hvdtrain.bench.app import AppLoop
from hvdtrain.config import parse
AppLoop(parse(sys.argv[2:]), Path(sys.argv[1]))
print("hierarchical", os.environ["HOROVOD_HIERARCHICAL_ALLREDUCE"])
"""


@pytest.mark.soak
def test_measured_loop_applies_horovod_settings_of_the_config(tmp_path: Path) -> None:
    flags = [*TINY, *processes.QUIET, "--train.duration=1", "--exchange.hierarchical=true"]
    done = subprocess.run(
        [sys.executable, "-c", _ENVIRONMENT, str(tmp_path), *flags],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["hierarchical 1"], done.stderr


@pytest.mark.soak
def test_memory_bench_reports_usage_and_ratio() -> None:
    _, metrics = _metrics("memory", "--rounds", "1")
    assert metrics["hvdtrain"]["median"] > 50  # MiB: torch alone needs more
    assert metrics["hvdtrain / plain PyTorch loop"]["aim"] == "<= 1.15"


@pytest.mark.soak
def test_checkpoint_bench_measures_stall_and_restore(tmp_path: Path) -> None:
    report, metrics = _metrics(
        "checkpoint", "--preset", "gpt-nano", "--rounds", "2", more=[f"--run.root={tmp_path}"]
    )
    assert metrics["stall, every 1 steps"]["aim"] == "<= 1"
    assert metrics["restore / plain read"]["unit"] == "x"
    assert metrics["stall per copy in memory"]["median"] > 0
    assert metrics["copies every 5 steps / without"]["unit"] == "x"
    assert report["bytes"] > 10000
    assert list(tmp_path.iterdir()) == []  # it leaves nothing


@pytest.mark.soak
def test_elastic_bench_reports_ratio_and_launcher_cpu_usage() -> None:
    done = _bench("elastic", "--steps", "2", "--rounds", "3", "--format", "json", "--", *TINY)
    assert done.returncode == 0, done.stderr
    metrics = {metric["name"]: metric for metric in json.loads(done.stdout)["figures"]}
    assert metrics["elastic / not elastic"]["aim"] == "<= 1.005"
    assert 0 < metrics["elastic"]["median"] < 10_000
    assert metrics["not elastic: launcher and watchdogs"]["unit"] == "% of a core"


@pytest.mark.soak
def test_recovery_bench_measures_pause_and_replacement_of_killed_rank(tmp_path: Path) -> None:
    _, metrics = _metrics("recovery", "--rounds", "1", more=[f"--run.root={tmp_path}"])
    pause, of_it = metrics["pause after a kill"], metrics["of which re-initialization"]
    assert of_it["median"] < pause["median"] < metrics["until all ranks are back"]["median"]
    assert list(tmp_path.iterdir()) == []  # it leaves nothing


def _start(at: float, cause: str, ranks: int) -> dict[str, Any]:
    return {"event": "start", "time": at, "cause": cause, "world_size": ranks, "seconds": 0.25}


# A kill at 10.5, during a step or just before its end; the new rank joins at 20.
EVENTS = [
    _start(1, "launch", 4),
    {"event": "checkpoint", "time": 5.0, "step": 5},
    _start(11.0, "failure", 3),
    _start(20.0, "hosts", 4),
]


@pytest.mark.parametrize(
    ("last", "pause"), [(10.0, 0.75), (10.75, 0.5)], ids=["in the step", "at its end"]
)
def test_recovery_pause_starts_at_the_kill_or_a_later_step_end(last: float, pause: float) -> None:
    lines = [{"time": t} for t in (9.0, last, 11.25, 19.5, 20.5, 21.0)]
    expected = Recovery(pause=pause, initialization=0.25, joining=1.0, whole=10.0)
    assert recovered(lines, EVENTS, since=10.5, np=4) == expected


def test_kill_without_effect_is_an_error() -> None:
    with pytest.raises(BenchError, match="was not detected, or not replaced"):
        recovered([{"time": 9.0}], EVENTS[:3], since=10.5, np=4)


def test_turn_ignores_lines_of_earlier_steps_that_are_written_in_it(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    metrics = tmp_path / "bench/metrics.jsonl"
    # Each write has the lines of 50 steps of 2 ms, of which 1 ms is computed.
    script = f"""
import json, time
with open({str(metrics)!r}, "w") as file:
    while True:
        for _ in range(50):
            computed = time.process_time() + 0.001
            while time.process_time() < computed:
                pass
            time.sleep(0.001)
            file.write(json.dumps({{"time": time.time()}}) + "\\n")
        file.flush()
"""
    with ControlledJob([sys.executable, "-c", script], tmp_path) as job:
        job.wait_for_more(10)
        job.freeze()
        turns = []
        for _ in range(2):
            time.sleep(4)
            turns += take_turns({"job": job}, 200, 1)["job"]
        cpu = cpu_per_step(job, turns)
    # Without the time for which the job was frozen, however busy the machine is.
    assert all(turn.step >= 0.002 and 200 * turn.step <= turn.awake for turn in turns), turns
    assert all(0.0005 < seconds < 0.01 for seconds in cpu), cpu


def test_median_range_matches_the_binomial_tables() -> None:
    assert median_range([3.0]) == (3.0, 3.0)
    # The 40th and the 61st of 100 values, according to tables of the binomial distribution.
    assert median_range([float(i) for i in range(1, 101)]) == (40.0, 61.0)


def test_table_marks_missed_aims() -> None:
    metrics = [
        BenchMetric("a", "x", [1.0, 3.0, 1.5], at_least=1.8),
        BenchMetric("b", "ms/step", [2.0]),
        BenchMetric("c", "x", [1.0], at_most=1.02),
    ]
    head, a, b, c, last = Report("none", metrics, {"bit_identical": True}).to_table().splitlines()
    assert head.split() == ["median", "min", "max", "aim"]
    assert a.split() == ["a", "1.5", "1", "3", "x", ">=", "1.8", "MISSED"]
    assert b.split() == ["b", "2", "2", "2", "ms/step"]
    assert c.endswith("<= 1.02 met")
    assert last.startswith("bit identical: True, load ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "0 is not an integer >= 1"),
        (["--np", "1"], "a number of ranks must be >= 2"),
        (["--preset", "gpt-nanu"], "no preset (digits, gpt-1b3, gpt-medium, gpt-nano"),
        (["--", "--model.layer=1"], "did you mean model.layers?"),
        (["--", "--batch.micro_size=32"], "1 micro-batches cannot be shared evenly"),
        (["--np", "1,2,x"], "x is not an integer >= 1"),
        (["--np", "2", "--hosts", "a:1"], "provides 1 of the 2 slots that --np requires"),
    ],
)
def test_invalid_command_line_is_rejected(arguments: list[str], message: str) -> None:
    done = _bench("scaling", *arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_error_of_a_measured_process_is_reported() -> None:
    done = _bench("overhead", "--", "--data.train=/none")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no file matches '/none'" in done.stderr
