"""Ranks that torchrun starts train as one run; their rendezvous."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed import PrefixStore, TCPStore

from hvdtrain.errors import EXIT_PREEMPTED, UserError
from hvdtrain.runtime import torchrun
from hvdtrain.runtime.torchrun import RankPlace, across_hosts, join, towards_others
from tests.support.job import Job, poll
from tests.support.runs import TINY, losses, metrics, start, train


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """The store that torchrun's agent serves."""
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment(store: TCPStore, rank: int, size: int = 2) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank), "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def _join_both(store: TCPStore) -> list[dict[str, str]]:
    ranks = [environment(store, rank) for rank in (1, 0)]
    threads = [threading.Thread(target=join, args=(env,)) for env in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ranks[::-1]


def test_ranks_get_places_and_one_rendezvous_with_a_secret(store: TCPStore) -> None:
    first, second = _join_both(store)
    for rank, env in enumerate((first, second)):
        named = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        places = [env[f"HOROVOD_{name}"] for name in named]
        assert places == [str(rank), "2", "0", "1", str(rank), "2"]
        # Two agents of one host: each is a host for Horovod.
        assert env["HOROVOD_HOSTNAME"] == f"{socket.gethostname()}-{rank}"
        assert env["HOROVOD_GLOO_IFACE"] == "lo"
        assert len(env["HOROVOD_RENDEZVOUS_SECRET"]) == 64
    shared = ("HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RENDEZVOUS_SECRET")
    assert [first[name] for name in shared] == [second[name] for name in shared]


def test_restarted_ranks_ignore_what_earlier_ones_wrote(store: TCPStore) -> None:
    ours = PrefixStore("hvdtrain", store)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = closed.getsockname()[1]
    ours.set("rendezvous", json.dumps({"port": gone, "secret": secrets.token_hex(32), "round": 0}))
    earlier = _join_both(store)
    # The server of the earlier rank 0 still runs, but not with this secret.
    port = int(earlier[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    ours.set("rendezvous", json.dumps({"port": port, "secret": secrets.token_hex(32), "round": 9}))
    later = _join_both(store)
    found = [env["HOROVOD_GLOO_RENDEZVOUS_PORT"] for env in later]
    assert found[0] == found[1] != str(port)


@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, r"ranks have not started: 1, 2"), (1, "rank 0 has not started")],
)
def test_wait_for_missing_ranks_ends_with_their_names(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, rank: int, message: str
) -> None:
    monkeypatch.setattr(torchrun, "_WAIT_SECONDS", 0.5)
    with pytest.raises(UserError, match=rf"rank {rank} on .* waited for 0 s: {message}") as error:
        join(environment(store, rank, size=3))
    assert error.value.exit_code == 1


def test_unreachable_store_is_reported_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "_WAIT_SECONDS", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        with pytest.raises(UserError, match=rf"cannot open torchrun's store at localhost:{port}"):
            join(env)


def test_request_to_stop_ends_the_wait_for_other_ranks(store: TCPStore) -> None:
    with pytest.raises(UserError, match="asked to stop") as error:
        join(environment(store, 1), stop=lambda: True)
    assert error.value.exit_code == EXIT_PREEMPTED


def test_hosts_with_different_numbers_of_ranks_are_counted_per_local_rank() -> None:
    places = [
        RankPlace("a", 0, ""),
        RankPlace("a", 1, ""),
        RankPlace("b", 0, ""),
        RankPlace("c", 0, ""),
    ]
    assert [across_hosts(places, rank) for rank in range(4)] == [(0, 3), (0, 1), (1, 3), (2, 3)]


def test_host_that_knows_itself_by_loopback_is_reached_through_its_network() -> None:
    places = [RankPlace("a", 0, "127.0.0.1"), RankPlace("b", 0, "10.0.0.2")]
    assert towards_others("127.0.1.1", places) == "10.0.0.2"
    assert towards_others("10.0.0.1", places) == "10.0.0.1"
    assert towards_others("127.0.1.1", places[:1]) == "127.0.1.1"


@pytest.mark.slow
def test_run_under_torchrun_has_the_losses_of_horovodrun(tmp_path: Path) -> None:
    steps = ["--train.duration", "6"]
    directories = [
        train(tmp_path, launcher, steps, f"{launcher}:2") for launcher in ("torchrun", "gloo")
    ]
    assert losses(directories[0]) == losses(directories[1])
    assert {line["world_size"] for line in metrics(directories[0])} == {2}


@pytest.mark.slow
def test_torchrun_restarts_once_from_the_checkpoint_then_ends(tmp_path: Path) -> None:
    run_id = ["--run.root", str(tmp_path), "--run.id", "a", "--checkpoint.every", "5"]
    job = start(
        tmp_path, [*TINY, *run_id, "--train.duration", "100000"], "torchrun:2:--max-restarts 1"
    )
    try:
        checkpoints = tmp_path / "a/checkpoints"
        poll(lambda: any(checkpoints.glob("step_*/complete")), 60, "a checkpoint")
        _kill_a_rank(job)
        job.wait_for("resumed from the checkpoint of step", 60)
        resumed = len(metrics(tmp_path / "a"))
        _wait_for_step(tmp_path / "a", resumed + 10)
        left = _kill_a_rank(job)
        done = job.wait(30)
    finally:
        job.kill()
    assert done.returncode == 1 and not [process for process in left if process.is_running()], done
    steps = [line["step"] for line in metrics(tmp_path / "a")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.soak
@pytest.mark.slow
def test_restart_without_a_run_id_is_refused(tmp_path: Path) -> None:
    done = start(tmp_path, TINY, "torchrun:2:--max-restarts 1").wait(60)
    assert "hvdtrain: error: run.id is missing: torchrun --max-restarts" in done.stderr, done
    assert "exitcode  : 2" in done.stderr, done  # as torchrun reports it


@pytest.mark.slow
def test_ranks_save_and_end_after_torchrun_and_they_got_sigusr1(tmp_path: Path) -> None:
    task = ["--task", "tests.support.tasks:SlowWhile", "--train.duration", "9999"]
    where = ["--run.root", str(tmp_path), "--run.id", "a"]
    # A step takes longer than the watchdog waits.
    slow = {"HVDTRAIN_TEST_SLOW": f"1.5:{tmp_path}"}
    job = start(tmp_path, [*TINY, *task, *where], "torchrun:2", slow)
    try:
        _wait_for_step(tmp_path / "a", 2)
        ranks = psutil.Process(job.pid).children()
        for pid in [job.pid, *(rank.pid for rank in ranks)]:
            os.kill(pid, signal.SIGUSR1)
        _, alive = psutil.wait_procs(ranks, 60)
        assert not alive
    finally:
        job.kill()
    steps = [line["step"] for line in metrics(tmp_path / "a")]
    assert steps == list(range(1, steps[-1] + 1))
    assert (tmp_path / "a" / "checkpoints" / f"step_{steps[-1]:08}").is_dir()


def _wait_for_step(directory: Path, step: int) -> None:
    file = directory / "metrics.jsonl"
    poll(lambda: file.exists() and len(metrics(directory)) >= step, 60, f"step {step}")


def _kill_a_rank(job: Job) -> list[psutil.Process]:
    """Kill the last rank; return the other ranks."""
    *others, last = psutil.Process(job.pid).children()
    os.kill(last.pid, signal.SIGKILL)
    return others
