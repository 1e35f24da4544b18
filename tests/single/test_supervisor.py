"""Parts of `hvdtrain launch` that need no hosts; see tests/cluster/test_launch.py for others."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UserError
from hvdtrain.launch.commands import elastic_horovodrun, mpirun_with_failure_detection
from hvdtrain.run_files.host_records import LAUNCH_VARIABLE
from hvdtrain.supervise import hosts, run_progress, supervisor
from hvdtrain.supervise import policy as pace_module
from hvdtrain.supervise.hosts import end_orphans
from hvdtrain.supervise.policy import Pace, RestartPolicy
from hvdtrain.supervise.supervisor import SupervisedRun, Supervisor
from tests.support.job import poll
from tests.support.runs import environment

TRAIN = ["python", "-m", "hvdtrain.train", "--run.id", "a b"]
STARTS = st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=60)


# --- when to try again


@given(STARTS, st.integers(0, 12))
def test_restarts_without_progress_respect_the_budget_and_backoff(
    starts: list[tuple[int, bool]], budget: int
) -> None:
    policy, most_advanced, used = RestartPolicy(budget, step=0), 0, 0
    for step, host_lost in starts:
        verdict = policy.after(137, step, host_lost)
        if step > most_advanced:
            most_advanced, used = step, 0
        if isinstance(verdict, str):
            assert verdict
            return
        used += 1
        assert used <= budget
        assert verdict == min(60, 2 ** (used - 1))


@pytest.mark.parametrize("code", [0, 2, 3, 75])
def test_final_exit_code_is_not_retried(code: int) -> None:
    assert isinstance(RestartPolicy(10, step=0).after(code, 0, host_lost=False), str)


def test_invalid_input_is_retried_after_steps_were_completed() -> None:
    policy = RestartPolicy(10, step=50)
    assert policy.after(1, 60, host_lost=False) == 1
    assert policy.after(2, 60, host_lost=False) == 2


def test_run_ends_after_three_failures_at_the_same_step() -> None:
    policy = RestartPolicy(10, step=0)
    *waits, last = (policy.after(1, 7, host_lost=False) for _ in range(3))
    assert waits == [1, 2] and isinstance(last, str)


def test_lost_host_does_not_count_as_a_failure_at_the_step() -> None:
    policy = RestartPolicy(10, step=0)
    waits = [policy.after(1, 7, host_lost=lost) for lost in (False, False, True, False)]
    assert all(isinstance(wait, float) for wait in waits)


def test_restarts_after_lost_hosts_are_limited_by_the_budget() -> None:
    policy = RestartPolicy(2, step=0)
    *waits, last = (policy.after(1, 0, host_lost=True) for _ in range(3))
    assert waits == [1, 2] and isinstance(last, str)


@given(st.lists(st.integers(1, 255), max_size=8), st.integers(0, 5))
def test_script_of_unknown_steps_is_restarted_within_the_budget(
    codes: list[int], budget: int
) -> None:
    policy = RestartPolicy(budget, step=0, steps_known=False)
    if codes[:1] == [2]:
        assert isinstance(policy.after(2, 0, host_lost=False), str)
        return
    waits = [policy.after(code, 0, host_lost=False) for code in codes]
    assert [isinstance(wait, str) for wait in waits] == [
        number >= budget for number in range(len(codes))
    ]
    assert isinstance(policy.after(0, 0, host_lost=False), str)


# --- when a silent host is believed to be lost


@given(st.lists(st.floats(0.01, 300), min_size=3, max_size=50), st.floats(0, 2.9))
def test_pause_of_usual_length_is_not_a_stall(pauses: list[float], times: float) -> None:
    pace, now = Pace(0.0, 7), 500.0
    for step, pause in enumerate(pauses, start=8):
        pace.saw(now, step)
        assert not pace.stalled(now)
        now += pause
    assert not pace.stalled(now - pauses[-1] + times * max(pauses[:-1]))


@given(st.lists(st.floats(0.01, 300), max_size=50))
def test_run_without_steps_is_stalled_after_a_time_limit(pauses: list[float]) -> None:
    pace, now = Pace(0.0, 0), 20.0
    for step, pause in enumerate(pauses, start=1):
        pace.saw(now, step)
        now += pause
    assert pace.stalled(now + 60 + 3 * max(pauses, default=0.0))
    assert 10 <= pace.stall_seconds() <= max(60, 3.01 * max(pauses, default=0.0))


@pytest.mark.parametrize(
    ("code", "saved", "told"),
    [(137, 3, "exit code 137 before they had saved step 9: the run resumes after step 3"),
     (137, 9, ""), (75, 3, "")],
)  # fmt: skip
def test_supervisor_says_if_ranks_ended_before_they_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, saved: int, told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plan = SupervisedRun(
        "gloo", 1, None, 1, 1.0, list, [], lambda name, deadline: True, [], tmp_path
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    monkeypatch.setattr(supervisor.run_progress, "newest_checkpoint", lambda run: saved)
    Supervisor(plan)._say_unsaved(code)
    found = capsys.readouterr().err
    assert (told in found) if told else not found


def test_silent_host_ends_a_start_only_if_no_step_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pace_module, "_LEAST_SECONDS", 0.5)
    monkeypatch.setattr(supervisor, "_LOOK_SECONDS", 0.1)
    plan = SupervisedRun(
        "mpi", 1, None, 1, 1.0, list, [], lambda name, deadline: False, [], tmp_path
    )
    killed = threading.Event()
    launcher = SimpleNamespace(poll=lambda: None, kill=killed.set)
    watch = SimpleNamespace(silent=lambda seconds: ["b"], steady=lambda seconds: [])
    ended: list[tuple[int, bool]] = []
    watching = threading.Thread(
        target=lambda: ended.append(Supervisor(plan)._watch(launcher, watch, [])),  # type: ignore[arg-type]
        daemon=True,
    )
    watching.start()
    for step in range(1, 15):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        time.sleep(0.2)
    assert not killed.is_set()
    watching.join(10)
    assert killed.is_set() and ended == [(1, False)]
    said = capsys.readouterr().err
    assert said.count("no response from b; the run continues while steps are completed") == 1
    assert "no response from b and no step for" in said


# --- started commands


def test_mpirun_detects_dead_hosts_and_exports_the_environment() -> None:
    env = {"HVDTRAIN_LAUNCH_ID": "/r", "HOROVOD_CYCLE_TIME": "2", "HOME": "/root", "OMP_X": "1"}
    argv = mpirun_with_failure_detection(12, TRAIN, "a:8,b:4", env)
    text = " ".join(argv)
    assert text.startswith("mpirun -np 12 ") and "-H a:8,b:4" in text
    assert argv[-len(TRAIN) :] == TRAIN
    ssh = argv[argv.index("plm_rsh_args") + 1]
    assert "ServerAliveInterval=1" in ssh and "BatchMode=yes" in ssh
    assert "--mca oob_tcp_keepalive_time 1" in text
    exported = [argv[i + 1] for i, word in enumerate(argv) if word == "-x"]
    assert exported == ["HOROVOD_CYCLE_TIME", "HVDTRAIN_LAUNCH_ID", "OMP_X"]


def test_elastic_horovodrun_gets_the_rank_limits_and_script() -> None:
    discovery = ["python", "-m", "hvdtrain.cli", "discover", "--hostfile", "/my hosts"]
    argv = elastic_horovodrun(4, 2, 8, discovery, TRAIN)
    assert argv[1:8] == ["--gloo", "-np", "4", "--min-np", "2", "--max-np", "8"]
    assert shlex.split(argv[argv.index("--host-discovery-script") + 1]) == discovery
    assert argv[-len(TRAIN) :] == TRAIN


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hosts a:2 -- --train.duration 5", "run.id is missing"),
        ("--hosts a:2 -- --run.id x --train.stepz 5", "unknown key train.stepz"),
        ("--hosts a:2 -- --run.id x --run.resume never", "run.resume never"),
        ("--hosts a:2 -- --run.id x --run.resume runs/x/checkpoints/step_00000010", "run.resume"),
        ("--hosts a:2 --min-np 3 -- --run.id x", "the hosts have 2 slots"),
        ("--hosts a:2 --min-np 2 --max-np 1 -- --run.id x", "less than --min-np"),
        ("--hosts a:2 --max-np 0 -- --run.id x", "0 is not an integer >= 1"),
        ("--hosts a:2 --probe x -- --run.id x", "--probe x"),
        ("--hostfile no-such-file -- --run.id x", "no-such-file"),
    ],
)
def test_mistake_is_named_before_anything_starts(
    tmp_path: Path, arguments: str, message: str
) -> None:
    done = _launch(tmp_path, *arguments.split())
    assert done.returncode == 2 and message in done.stderr, done
    assert "starting" not in done.stderr and not list(tmp_path.iterdir())


def test_second_supervisor_of_a_run_is_refused(tmp_path: Path) -> None:
    with run_progress.hold(tmp_path / "runs/x"):
        done = _launch(tmp_path, "--hosts", "localhost:1", "--", "--run.id", "x")
    assert done.returncode == 2 and "another hvdtrain launch supervises this run" in done.stderr
    with run_progress.hold(tmp_path / "runs/x"):
        pass


def _launch(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain.cli", "launch", *arguments],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


# --- reads of a run's files


def test_progress_is_read_despite_torn_lines_and_partial_saves(tmp_path: Path) -> None:
    assert run_progress.newest_step(tmp_path) == 0
    for step, name in ((20, "complete"), (30, "files.json")):
        (tmp_path / f"checkpoints/step_{step:08d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step_{step:08d}" / name).touch()
    assert run_progress.newest_step(tmp_path) == run_progress.newest_checkpoint(tmp_path) == 20
    now = time.time()
    lines = [json.dumps({"step": step, "time": now}) for step in range(1, 2000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 20')
    assert run_progress.newest_step(tmp_path) == 1999
    assert run_progress.made_steps(tmp_path, now - 1) and not run_progress.made_steps(
        tmp_path, now + 1
    )


def test_last_errors_are_recent_and_start_with_the_cause(tmp_path: Path) -> None:
    def log(rank: int, *entries: tuple[float, str, str]) -> None:
        (tmp_path / "logs").mkdir(exist_ok=True)
        lines = [
            json.dumps({"time": at, "level": level, "rank": rank, "host": "n", "message": message})
            for at, level, message in entries
        ]
        (tmp_path / f"logs/rank_{rank:05d}.jsonl").write_text("\n".join(lines) + "\n")

    log(0, (5, "error", "HorovodInternalError: lost"), (3, "info", "fine"))
    log(1, (1, "error", "from the start before"))
    log(2, (4, "error", "first"), (6, "error", "RuntimeError: the cause"))
    assert run_progress.last_errors(tmp_path, since=2) == [
        "rank 2 on n: RuntimeError: the cause",
        "rank 0 on n: HorovodInternalError: lost",
    ]


# --- processes of an earlier start


def test_only_processes_of_the_launch_are_killed(tmp_path: Path) -> None:
    mine = f"{tmp_path}/it's mine"
    sleepers = [
        subprocess.Popen(["sleep", "60"], env=os.environ | {LAUNCH_VARIABLE: launch_id})
        for launch_id in (mine, f"{mine}2")
    ]
    try:
        # Until exec, the child still has this process's environment.
        poll(lambda: all(LAUNCH_VARIABLE in _environ(p.pid) for p in sleepers), 10, "the sleepers")
        assert end_orphans(["localhost"], mine) == []
        assert sleepers[0].wait(5) == -9
        assert sleepers[1].poll() is None
    finally:
        for process in sleepers:
            process.kill()
            process.wait(5)


def test_unreachable_host_is_reported_as_not_cleaned() -> None:
    assert end_orphans(["no-such-host.invalid", "localhost"], "/none") == ["no-such-host.invalid"]


def test_sweep_of_a_host_whose_name_resolves_late_kills_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolved, swept = threading.Event(), list[object]()
    monkeypatch.setattr(hosts, "_SECONDS", 0.2)
    monkeypatch.setattr(hosts, "is_this_host", lambda _: resolved.wait(60))
    monkeypatch.setattr(subprocess, "run", lambda *argv, **_: swept.append(argv))
    before = {*threading.enumerate()}
    assert end_orphans(["late"], "/none") == ["late"]
    resolved.set()
    for sweep in {*threading.enumerate()} - before:
        sweep.join(20)
    assert not swept


def test_missing_launcher_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdtrain.supervise.launcher import Launcher

    with pytest.raises(UserError, match="no-such-mpirun is not found"):
        Launcher(["no-such-mpirun"], {}, "/")


def _environ(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()
