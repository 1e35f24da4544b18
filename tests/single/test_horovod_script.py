"""Unchanged scripts of Horovod's elastic API in a rank of hvdtrain's elastic driver."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from horovod.common import basics, elastic
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch.elastic.state import TorchState

from hvdtrain.elastic import horovod_script, watchdog
from hvdtrain.elastic.horovod_script import ScriptProgress, ScriptRank, States, order_gpus
from hvdtrain.elastic.status import STATE_TRANSFER, TRAINING, Identity, ProcessStatus
from hvdtrain.runtime.heartbeat import Activity, Heartbeat
from tests.support.runs import REPOSITORY, environment

IDENTITY = Identity("", "digest", 0, None)


class Rank:
    """Horovod's loop around a training function, in a world of one rank.

    Attributes:
        generation: number of the current generation.
        statuses: (trained, commits, failed phase) at each reset.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.progress = ScriptProgress()
        self.states = States(self.progress)
        monkeypatch.setattr(elastic, "notification_manager", self.states)
        self.generation = 0
        self.statuses: list[tuple[bool, int, str | None]] = []
        self.state: Any = elastic.ObjectState(lambda value: value, lambda: 0, batch=0)
        self.progress.begin()

    def reset(self) -> None:
        status = self.progress.status(IDENTITY)
        self.statuses.append((status.trained, status.step, status.failed))
        self.generation += 1
        self.progress.begin()

    def run(self, train: Any) -> None:
        elastic.run_fn(train, self.reset)(self.state)


def test_state_shows_commits_and_the_phase_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)

    def train(state: Any) -> None:
        state.batch += 1
        if rank.generation == 0:
            state.commit()
        if rank.generation < 2:
            state.batch += 1
            raise HorovodInternalError("a rank died")

    rank.run(train)
    assert rank.statuses == [(True, 1, TRAINING), (True, 1, TRAINING)]
    assert rank.state.batch == 2 and rank.progress.failed is None


def test_failure_before_the_state_is_synchronized_is_one_of_its_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    sync, failures = rank.state.sync, [HorovodInternalError("a rank died")]
    monkeypatch.setattr(rank.state, "_bcast_object", lambda value: value)

    def fail_once() -> None:
        if failures:
            raise failures.pop()
        sync()

    monkeypatch.setattr(type(rank.state), "sync", lambda _: fail_once())
    rank.run(lambda _: None)
    assert rank.statuses == [(False, 0, STATE_TRANSFER)]
    assert rank.progress.trained


def test_failure_before_the_first_commit_restores_the_synchronized_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    model = torch.nn.Linear(1, 1)
    rank.state = TorchState(model, batch=0)

    def receive(weights: dict[str, torch.Tensor], root_rank: int) -> None:
        for tensor in weights.values():
            tensor.fill_(5.0 + rank.generation)

    monkeypatch.setattr("horovod.torch.elastic.state.broadcast_parameters", receive)
    monkeypatch.setattr(rank.state, "_bcast_object", lambda value: value)
    monkeypatch.setattr(rank.state, "_rank", lambda: 0)
    restored: list[float] = []
    monkeypatch.setattr(rank.state, "on_reset", lambda: restored.append(model.bias.item()))

    def train(state: Any) -> None:
        model.bias.data.fill_(9.0)
        if rank.generation == 0:
            raise HorovodInternalError("a rank died")

    rank.run(train)
    assert restored == [5.0]
    assert [commits for _, commits, _ in rank.statuses] == [0]


def test_change_of_hosts_interrupts_the_next_commit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    interrupted: list[int] = []

    def train(state: Any) -> None:
        state.batch += 1
        try:
            state.commit()
            rank.states.hosts_changed(rank.generation)
            rank.states.hosts_changed(rank.generation)
            state.commit()
        except HostsUpdatedInterrupt as interrupt:
            assert not interrupt.skip_sync, "a new process has no state yet"
            interrupted.append(state.batch)
            if rank.generation < 2:
                raise

    rank.run(train)
    assert interrupted == [1, 2, 3]
    assert [failed for *_, failed in rank.statuses] == [None, None]


def test_process_is_watched_only_while_others_wait_for_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heartbeat = Heartbeat()
    monkeypatch.setattr(horovod_script, "HEARTBEAT", heartbeat)
    seen: list[Activity] = []

    def join(status: Any, set_aside: Any) -> dict[str, int]:
        rank._abort()  # the same message arrives again
        sent = json.loads(json.dumps(asdict(status())))
        assert ProcessStatus.of(sent).verdict_seconds == math.inf, "a busy process has no limit"
        seen.append(heartbeat.read()[1])
        return {"local_rank": 0}

    membership: Any = SimpleNamespace(join=join)
    rank = ScriptRank(membership, 0, 0, ["script.py"])
    rank._abort()
    seen.append(heartbeat.read()[1])
    rank._join()
    seen.append(heartbeat.read()[1])
    assert seen == [Activity.LOADING, Activity.WAITING, Activity.WAITING]


@pytest.mark.parametrize(("starts", "attempts"), [(False, 20), (True, 1)])
def test_init_is_repeated_only_if_horovod_did_not_start(starts: bool, attempts: int) -> None:
    done: list[bool] = []

    def start() -> None:
        done.append(starts)
        raise ValueError("process_sets entry number 1 is a duplicate")

    horovod: Any = SimpleNamespace(is_initialized=lambda: any(done), shutdown=lambda: None)
    membership: Any = SimpleNamespace(join=lambda status, set_aside: {"local_rank": 0})
    with pytest.raises(ValueError, match="duplicate"):
        ScriptRank(membership, 0, 0, ["script.py"])._init(horovod, start)
    assert len(done) == attempts


def test_question_for_gpus_before_init_does_not_fix_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(basics.HorovodBasics, "init", basics.HorovodBasics.init)
    monkeypatch.setattr(elastic, "notification_manager", elastic.notification_manager)
    monkeypatch.setattr(watchdog, "KeptWatchdog", lambda start: None)
    monkeypatch.setattr(horovod_script, "HEARTBEAT", Heartbeat())
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
    membership: Any = SimpleNamespace(
        served=lambda: True,
        listen=lambda on_over: None,
        launcher="",
        hosts_changed=False,
    )
    ScriptRank(membership, 0, 0, ["script.py"]).install()
    assert torch.cuda._nvml_based_avail()


@pytest.mark.parametrize(
    ("listed", "slot", "local_rank", "gpu"),
    [
        ("0,1,2", 0, 2, "0"),
        ("GPU-a,GPU-b", 1, 0, "GPU-b"),
        ("4,5", 1, 1, "5"),
        ("4", 1, 0, "4"),  # more ranks than GPUs
    ],
)
def test_local_rank_of_a_new_process_selects_the_gpu_of_its_slot(
    listed: str, slot: int, local_rank: int, gpu: str
) -> None:
    env = {"CUDA_VISIBLE_DEVICES": listed}
    order_gpus(slot, local_rank, env)
    devices = env["CUDA_VISIBLE_DEVICES"].split(",")
    assert devices[local_rank] == gpu and sorted(devices) == sorted(listed.split(","))


AS_MAIN = """\
import atexit, os, pickle, sys, threading, time
from neighbor import NAME
class Local: pass
def check(when):
    assert type(pickle.loads(pickle.dumps(Local()))) is Local, when
    assert sys.modules["__main__"].Local is Local, when
    print(when, flush=True)
def check_later():
    while threading.main_thread().is_alive(): time.sleep(0.01)
    check("in a thread")
value: int = 0
assert __annotations__["value"] is int and __name__ == "__main__" and __spec__ is None
atexit.register(check, "at exit")
threading.Thread(target=check_later).start()
print(NAME, sys.argv, __file__, sys.path, flush=True)
"""


def test_script_runs_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "neighbor.py").write_text("NAME = 'a module next to the script'")
    (tmp_path / "sub" / "script.py").write_text(AS_MAIN)
    (tmp_path / "fails.py").write_text("import sys\nsys.exit(5)\n")
    env = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}

    def run(*argv: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, *argv],
            capture_output=True,
            text=True,
            timeout=60,
            env=env,
            cwd=tmp_path,
        )
        return done.returncode, done.stdout, done.stderr

    module = ("-m", "hvdtrain.elastic.horovod_script")
    expected = run("sub/script.py", "--lr", "1")
    assert expected[0] == 0 and "in a thread" in expected[1] and "at exit" in expected[1]
    assert run(*module, "sub/script.py", "--lr", "1") == expected
    env["PYTHONPATH"] = f"{tmp_path}/first:{REPOSITORY}"
    assert run(*module, "sub/script.py") == run("sub/script.py")
    assert run(*module, "fails.py") == (5, "", "")


def test_script_starts_in_a_directory_that_was_removed(tmp_path: Path) -> None:
    script, gone = tmp_path / "script.py", tmp_path / "gone"
    script.write_text("import sys; print(sys.argv[1])")
    gone.mkdir()
    command = [sys.executable, "-m", "hvdtrain.elastic.horovod_script", str(script), "ran"]
    shell = f"cd {gone} && rmdir {gone} && exec {shlex.join(command)}"
    done = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, env=environment(), check=False
    )
    assert (done.returncode, done.stdout) == (0, "ran\n"), done
