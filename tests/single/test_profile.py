"""Profiles of selected steps, and `hvdtrain profile summary`."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.runtime.environment import prepare
from hvdtrain.runtime.memory import PeakMemory, Peaks
from hvdtrain.runtime.phases import PhaseTimer
from hvdtrain.telemetry.profile_summary import TRACE, clear, summarize
from tests.support import runs
from tests.support.job import Finished

pytestmark = pytest.mark.slow

PACED = (
    "--task tests.support.disturbed:Lagging --batch.global_size 8 --batch.micro_size 2"
    " --eval.every 0 --telemetry.port 0 --telemetry.exchange_every 1 --train.duration 14"
)


def _run(directory: Path, arguments: str, launcher: str = "", late: int = 9) -> Finished:
    """Run 14 steps in directory/run; rank `late` takes 30 ms longer for each sample."""
    slow = directory / "slow"
    slow.touch()
    env = {"HVDTRAIN_TEST_LAG": f"{late}:0.03:{slow}", "HVDTRAIN_TEST_PACE": "0.05"}
    where = ["--run.root", str(directory), "--run.id", "run"]
    flags = [*PACED.split(), *where, *arguments.split()]
    done = runs.run(directory, flags, launcher, env)
    assert done.returncode == 0, done
    return done


def _spans(trace: Path) -> dict[str, float]:
    """Return name -> seconds of all its spans on the host."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "user_annotation":
            seconds[event["name"]] += event["dur"] / 1e6
    return seconds


@pytest.mark.alone
@pytest.mark.parametrize("launcher", ["gloo:2", "mpirun:2"])
def test_profile_contains_steps_ranks_phases_and_late_rank(tmp_path: Path, launcher: str) -> None:
    _run(tmp_path, "--profile.steps 10:13 --checkpoint.every 11", launcher, late=1)
    directory = tmp_path / "run/profile"
    host = os.uname().nodename
    stems = [f"rank_{rank:05}_{host}.10" for rank in (0, 1)]
    expected = [stem + suffix for stem in stems for suffix in (".json", TRACE)]
    assert sorted(p.name for p in directory.iterdir()) == sorted([*expected, "timeline.10.json"])
    exchanged = (tmp_path / "run/ranks.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, exchanged) if 10 <= line["step"] < 13]
    for rank, stem in enumerate(stems):
        spans = _spans(directory / (stem + TRACE))
        steps = {name for name in spans if name.startswith("ProfilerStep#")}
        assert steps == {"ProfilerStep#10", "ProfilerStep#11", "ProfilerStep#12"}
        for phase in ("data", "forward", "backward", "comm_exposed", "optimizer"):
            known = sum(line["phases"][phase][rank] for line in lines)
            assert spans[f"phase {phase}"] == pytest.approx(known, rel=0.05, abs=0.01), phase
    (part,) = summarize(tmp_path / "run")
    assert part.steps == (10, 13) and part.late == 1 and not part.problems, part
    assert part.lateness[1].last == 3 and 0.05 < part.lateness[1].mean_seconds < 0.5
    for rank in part.ranks:
        wall = rank.profile.wall_seconds
        assert sum(rank.profile.phases.values()) == pytest.approx(wall, rel=0.02)
        assert set(rank.profile.host_peak_bytes or {}) >= {"forward", "backward", "optimizer"}
    assert part.ranks[0].profile.phases["checkpoint"] > 0
    assert part.ranks[0].exposed > part.ranks[1].exposed  # it waited for the late rank
    assert any(one.name.startswith("aten::") for one in part.operators)


def test_only_selected_ranks_write_traces(tmp_path: Path) -> None:
    _run(tmp_path, "--profile.steps 13:99 --profile.ranks [1]", "gloo:2")
    names = {path.name[:10] for path in (tmp_path / "run/profile").iterdir()}
    assert names == {"rank_00001", "timeline.1"}
    (part,) = summarize(tmp_path / "run")
    assert part.steps == (13, 15), "the run's last step ends the profile"


def test_run_without_profile_starts_no_profiling(tmp_path: Path) -> None:
    _run(tmp_path, "")
    assert not (tmp_path / "run/profile").exists()
    env = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
    prepare(env)
    assert "HOROVOD_TIMELINE" not in env, "Horovod would start a thread that spins"
    prepare(env, timeline=True)
    assert env["HOROVOD_TIMELINE"] == "DYNAMIC"


def test_steps_before_resume_are_reported_as_not_profiled(tmp_path: Path) -> None:
    where = ["--run.root", str(tmp_path), "--run.id", "run"]
    for steps, flags in (("6", []), ("8", ["--profile.steps", "3:5"])):
        argv = [*runs.TINY, *where, "--train.duration", steps, *flags]
        done = runs.run(tmp_path, argv, timeout=60)
        assert done.returncode == 0, done
    assert "profile.steps 3:5: the run is at step 6" in done.stderr, done


def test_unwritable_profile_directory_is_reported_once_and_run_continues(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/profile").write_text("in the way")
    done = _run(tmp_path, "--profile.steps 5:9", "gloo:2")
    on_screen = [line for line in done.stderr.splitlines() if "training continues without" in line]
    assert len(on_screen) == 1, done
    assert len(runs.metrics(tmp_path / "run")) == 14
    for rank in (0, 1):
        (log,) = (tmp_path / "run/logs").glob(f"rank_{rank:05}*")
        assert log.read_text().count("training continues without") == 1


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        *((steps, "profile.steps must be FIRST:END") for steps in ("13:10", "5:5", "0:3", "7")),
        *((steps, "profile.steps must be FIRST:END") for steps in ("a:b", ":3", "3:", "1:2:3")),
        ("15:20", r"profile.steps 15:20 begins after the last step \(train.duration 14\)"),
    ],
)
def test_invalid_or_empty_step_range_is_rejected(steps: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(["--profile.steps", steps, "--train.duration=14"])


def test_unquoted_yaml_step_range_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("profile:\n  steps: 10:13\n")
    with pytest.raises(UserError, match='in YAML "10:13", with quotes'):
        parse([f"--config={file}"])
    file.write_text('profile:\n  steps: "10:13"\n')
    assert parse([f"--config={file}"]).config.profile.range == range(10, 13)


@pytest.mark.parametrize("ranks", ["0,3", "[0, 3]"])
def test_ranks_are_read_with_and_without_brackets(ranks: str) -> None:
    parsed = parse(["--profile.steps=1:2", f"--profile.ranks={ranks}"])
    assert parsed.config.profile.named_ranks == {0, 3}


@pytest.mark.parametrize("ranks", ["[]", "[-1]", "x"])
def test_invalid_ranks_are_rejected(ranks: str) -> None:
    with pytest.raises(UserError, match=r"profile\.ranks"):
        parse(["--profile.steps=1:2", f"--profile.ranks={ranks}"])


def test_rank_beyond_world_size_is_rejected(tmp_path: Path) -> None:
    flags = ["--profile.steps=1:2", "--profile.ranks=[0,3]", "--run.root", str(tmp_path)]
    done = runs.run(tmp_path, [*runs.TINY, *flags], timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert "profile.ranks 3: the run's ranks are 0 to 0" in done.stderr


def test_peak_memory_is_recorded_per_phase() -> None:
    timer = PhaseTimer(time.perf_counter())
    memory, whole, part = PeakMemory(torch.device("cpu"), timer), Peaks(), Peaks()
    timer.enter("data")
    memory.record(whole)
    timer.enter("forward")
    big = torch.ones(128 << 20)  # 512 MiB, touched: more than this process may have free
    del big
    timer.enter("backward")
    memory.record(part)  # a profile begins
    timer.enter("optimizer")
    memory.stop(part)
    memory.stop(part)
    timer.enter("eval")
    memory.stop(whole)
    timer.enter("checkpoint")
    assert whole.device == part.device == {}, "there is no GPU"
    assert [*whole.host] == ["data", "forward", "backward", "optimizer", "eval"]
    assert [*part.host] == ["backward", "optimizer"]
    assert whole.host["forward"] > whole.host["data"] + (300 << 20)
    assert max(whole.host["backward"], part.host["backward"]) < whole.host["forward"] - (300 << 20)
    assert memory.most() == (whole.host["forward"], 0), "the process forgot its own peak"


def test_profiles_of_repeated_steps_are_removed(tmp_path: Path) -> None:
    kept = ["rank_00000_a.b.9.json", f"rank_00000_a.b.9{TRACE}", "notes.12.txt"]
    gone = ["rank_00001_a.b.10.json", f"rank_00001_a.b.12{TRACE}", "timeline.10.json"]
    for name in (*kept, *gone):
        (tmp_path / name).touch()
    clear(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def _call(name: str, begin: float, dur: float, tid: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": dur, "pid": 1, "tid": tid}


def _write(directory: Path, rank: int, events: list[dict[str, Any]], device: str = "cpu") -> None:
    phases = {"data": 1.0, "forward": 2.0, "backward": 3.0, "comm_exposed": 1.0, "optimizer": 1.0}
    metrics = {
        **{"rank": rank, "host": "a", "world_size": 2, "steps": [4, 6], "device": device},
        **{"phases": {**phases, "eval": 0.5, "checkpoint": 0.5, "other": 1.0}},
        **{"wall_seconds": 10.0, "inflight_seconds": 2.5},
        **{"host_peak_bytes": None, "device_peak_bytes": None},
    }
    stem = f"rank_{rank:05}_a.4"
    (directory / f"{stem}.json").write_text(json.dumps(metrics))
    (directory / (stem + TRACE)).write_bytes(gzip.compress(json.dumps(events).encode()))


def test_summary_assigns_time_to_phases_and_operators(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    calls = [_call("outer", 0, 100), _call("inner", 10, 30), _call("inner", 50, 20)]
    calls += [_call("innermost", 15, 5), _call("outer", 200, 10), _call("inner", 0, 7, tid=2)]
    _write(tmp_path / "profile", 0, calls)
    _write(tmp_path / "profile", 1, [])
    (part,) = summarize(tmp_path)
    own = {one.name: (round(one.seconds * 1e6), one.calls) for one in part.operators}
    assert own == {"outer": (60, 2), "inner": (52, 3), "innermost": (5, 1)}
    rank = part.ranks[0]
    assert (rank.compute, rank.exposed, rank.other, rank.overlapped) == (7.0, 1.0, 2.0, 1.5)
    # Without the timeline, the other parts are still reported.
    assert part.late is None and "timeline.4.json cannot be read" in part.problems[0]


def test_gpu_operators_come_from_device_kernels(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    calls = [_call("aten::mm", 0, 10), _call("gemm", 5, 400, cat="kernel")]
    _write(tmp_path / "profile", 0, calls, "cuda")
    (part,) = summarize(tmp_path)
    assert [one.name for one in part.operators] == ["gemm"]


def test_summary_runs_without_torch_and_reports_late_rank(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    _write(tmp_path / "profile", 0, [_call("aten::mm", 0, 10)])
    _write(tmp_path / "profile", 1, [])
    pids = {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "allreduce.ready.step_4"}}
    ticks = [{"ph": "X", "name": str(r), "pid": 7, "ts": 1e6 + r * 9e5} for r in (0, 1)]
    (tmp_path / "profile/timeline.4.json").write_text(json.dumps([pids, *ticks]))
    code = (
        "import sys; from hvdtrain.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'horovod', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    outputs = {}
    for name in ("text", "json"):
        argv = [sys.executable, "-c", code, "profile", "summary", str(tmp_path), "--format", name]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        outputs[name] = done.stdout
    assert "rank 0 on a  5000.00    70.0%    10.0%  20.0%       15.0%" in outputs["text"], outputs[
        "text"
    ]
    assert "rank 1 was late: last in 1 of 1 steps, 900.00 ms behind" in outputs["text"]
    (part,) = json.loads(outputs["json"])["parts"]
    assert part["late"] == 1 and part["operators"][0]["name"] == "aten::mm"


def test_summary_rejects_run_without_profiles(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"contains no profile; train with --profile\.steps"):
        summarize(tmp_path)


def test_peak_memory_is_known_on_kernels_without_a_high_water_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"  # as on gVisor
    status.write_text("VmSize:\t 200000 kB\nVmRSS:\t 100000 kB\nVmData:\t 50000 kB\n")
    monkeypatch.setattr("hvdtrain.runtime.memory._STATUS", status)
    timer = PhaseTimer(time.perf_counter())
    memory, peaks = PeakMemory(torch.device("cpu"), timer), Peaks()
    memory.record(peaks)
    timer.enter("forward")
    memory.stop(peaks)
    resident = psutil.Process().memory_info().rss
    assert 0.9 * resident < memory.most()[0] < 100 * resident  # bytes; counters of the kernel lag
    assert peaks.host == {}, "the peak of a phase is unknown if the mark cannot be reset"
