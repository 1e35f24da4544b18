"""checkpoint.mirror while the store refuses connections, or accepts them and never answers."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from hvdtrain.checkpoint import mirror as mirror_module
from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.checkpoint.format import Checkpoint
from hvdtrain.checkpoint.manager import CheckpointManager
from hvdtrain.checkpoint.mirror import Mirror, ObjectStore, check_mirror
from hvdtrain.errors import EXIT_CRASH, EXIT_PREEMPTED, UserError
from hvdtrain.run_files import owner_token
from tests.support import warm
from tests.support.job import Job, poll
from tests.support.relay import Relay
from tests.support.runs import metrics
from tests.support.s3 import BUCKET, S3Server, s3_server

SECONDS = 90
LAUNCH = [sys.executable, "-m", "hvdtrain.cli", "launch", "--slots", "2", "--"]
TRAIN = [
    *("--task", "tests.support.tasks:Paced", "--train.duration", "100000", "--telemetry.port", "0"),
    *("--checkpoint.every", "20", "--checkpoint.mirror_wait_seconds", "1", "--run.id", "run"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def relay(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """A relay to the store, whose address is in the environment."""
    relay = Relay(urlsplit(server.env["AWS_ENDPOINT_URL"]).port or 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{relay.port}")
    yield relay
    relay.refuse()


@pytest.fixture
def silence(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let the store be silent, which a run then notices after one second, or answer again."""
    monkeypatch.setattr(mirror_module, "_RETRY_SECONDS", (0.01,))
    usual = mirror_module._ANSWER_SECONDS

    def set_to(silent: bool) -> None:
        relay.silent = silent
        monkeypatch.setattr(mirror_module, "_ANSWER_SECONDS", 1.0 if silent else usual)

    return set_to


class Mirrored:
    """A mirror of the run directory `run`, without ranks."""

    def __init__(self, run: Path, url: str, job: int = 1) -> None:
        self.events: list[dict[str, Any]] = []
        self.mirror = Mirror(run, url, CheckpointConfig(keep=2), job)
        self.manager = CheckpointManager(run / "checkpoints", 2, mirror=self.mirror)

    def open(self, resumed_at: int) -> None:
        self.mirror.open(1.7e9, resumed_at, lambda event, **more: self.events.append({event: more}))

    def save(self, step: int) -> None:
        self.manager.save(Checkpoint({"model": {"w": torch.ones(9)}}, {"step": step}))

    def wait(self) -> list[str]:
        """Wait for the uploads; return the names of the events."""
        assert self.mirror.wait(SECONDS)
        return [name for event in self.events for name in event]


def test_first_start_is_refused_when_the_store_does_not_answer(
    relay: Relay, silence: Callable[[bool], None]
) -> None:
    silence(True)
    with pytest.raises(UserError, match=r"cannot be written \(no answer for 1 s\)") as refused:
        check_mirror(f"s3://{BUCKET}/first", "run")
    assert refused.value.exit_code == 2
    # On a busy machine the client may need this second to prepare its first request.
    poll(lambda: relay.held, SECONDS, "a connection")


def test_requests_to_a_silent_store_end(
    silence: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file = ObjectStore(f"s3://{BUCKET}/silent"), tmp_path / "file"
    file.write_bytes(b"content")
    wanted = {"bytes": 7, "sha256": mirror_module.sha256_of(file)}
    silence(True)
    for request in (
        lambda: store.read("object"),
        lambda: store.write("object", b"content"),
        store.sizes,
        lambda: store.send(file, wanted, "object"),
        lambda: store.delete("object"),
        lambda: store.receive("object", tmp_path / "received", 7),
    ):
        with pytest.raises(TimeoutError, match="no answer for 1 s"):
            request()
    monkeypatch.setattr(ObjectStore, "_has", lambda *_: False)
    with pytest.raises(TimeoutError, match="no answer for 1 s"):
        store.send(file, wanted, "object")


def test_store_that_stalls_in_any_request_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file, end = ObjectStore(f"file://{tmp_path}/store"), tmp_path / "file", threading.Event()
    file.write_bytes(b"content")
    wanted = {"bytes": 7, "sha256": mirror_module.sha256_of(file)}
    store.send(file, wanted, "object")
    monkeypatch.setattr(mirror_module, "_ANSWER_SECONDS", 0.2)

    def stall(*_: Any, **__: Any) -> None:
        end.wait(20)

    for name in ("rm", "get_file", "open"):
        monkeypatch.setattr(store._fs, name, stall)
    for request in (
        lambda: store.delete("object"),
        lambda: store.delete("", recursive=True),
        lambda: store.receive("object", tmp_path / "received", 7),
        lambda: store.send(file, wanted, "object"),
    ):
        with pytest.raises(TimeoutError, match="no answer for 0 s"):
            request()
    end.set()


def test_slow_download_that_makes_progress_is_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file = ObjectStore(f"file://{tmp_path}/store"), tmp_path / "file"
    asked, written = threading.Semaphore(0), threading.Semaphore(0)

    def get_file(*_: Any, callback: Any) -> None:
        for piece in range(4):
            asked.acquire()
            if piece % 2:
                callback.relative_update(1)
            else:
                file.write_bytes(b"c" * (piece + 1))
            written.release()

    def wait_for(outcomes: list[Any], _: float) -> Any:
        asked.release()
        written.acquire(timeout=20)
        return wait(outcomes, 20 if asks.pop() else 0)

    wait, asks = mirror_module.wait_for, [True, False, False, False]
    monkeypatch.setattr(store._fs, "get_file", get_file)
    monkeypatch.setattr(mirror_module, "wait_for", wait_for)
    store.receive("object", file, 4)
    assert not asks


def test_run_continues_from_its_own_checkpoint_without_the_store(
    silence: Callable[[bool], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, url = tmp_path / "run", f"s3://{BUCKET}/own"
    first = Mirrored(run, url)
    first.open(0)
    first.save(2)
    assert first.wait() == ["mirrored"]
    first.mirror.close()
    silence(True)
    second = Mirrored(run, url, job=2)
    with caplog.at_level(logging.ERROR, "hvdtrain"):
        second.mirror.restore(1.7e9, fresh=False)
    assert f"{url} cannot be read (no answer for 1 s); the run continues from its" in caplog.text
    second.open(2)
    second.save(4)
    assert set(second.wait()) == {"mirror_failed"}
    silence(False)
    second.save(6)
    assert second.wait()[-1] == "mirrored"
    assert "step_00000006/complete" in ObjectStore(url).sizes()
    silence(True)
    with pytest.raises(UserError, match="cannot be read") as crashed:
        Mirrored(tmp_path / "elsewhere/run", url).mirror.restore(None, fresh=False)
    assert crashed.value.exit_code == EXIT_CRASH


def test_newer_checkpoint_that_could_not_be_read_is_not_deleted(
    relay: Relay, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"s3://{BUCKET}/newer"
    for name, step in (("run", 2), ("elsewhere/run", 8)):
        one = Mirrored(tmp_path / name, url)
        one.open(8)
        one.save(step)
        assert one.wait() == ["mirrored"]
        one.mirror.close()
    back = Mirrored(tmp_path / "run", url, job=2)
    relay.refuse()
    back.mirror.restore(1.7e9, fresh=False)
    relay.answer()
    with caplog.at_level(logging.ERROR, "hvdtrain"):
        back.open(2)
        back.save(4)
        assert back.wait() == ["mirror_lost"]
    assert f"{url} has the checkpoint of step 8, but could not be read" in caplog.text
    assert "step_00000008/complete" in ObjectStore(url).sizes()


@pytest.mark.slow
@pytest.mark.parametrize("outage", ["refused", "silent"])
def test_recovery_and_joining_do_not_wait_for_the_store(
    server: S3Server, relay: Relay, tmp_path: Path, outage: str
) -> None:
    flags = [*TRAIN, "--run.root", str(tmp_path), "--elastic.hang_seconds", "20"]
    flags += ["--checkpoint.mirror", f"s3://{BUCKET}/{outage}"]
    argv = [*LAUNCH, warm.prefix(2), sys.executable, "-m", "hvdtrain.train", *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HVDTRAIN_TEST_PACE": "0.02"}
    job, run = Job([], argv, env, tmp_path / "output"), tmp_path / "run"

    def uploaded(since: int) -> list[int]:
        marked = (name for name in server.objects(f"{outage}/") if name.endswith("/complete"))
        return [step for name in marked if (step := int(name.split("_")[1][:8])) > since]

    def wait(what: Any, name: str) -> None:
        def reached() -> bool:
            assert job.running(), job.output()
            return bool(what())

        try:
            poll(reached, SECONDS, name)
        except AssertionError as error:
            raise AssertionError(f"{error}: {job.output()}") from None

    try:
        wait(lambda: uploaded(0), "upload")
        if outage == "silent":
            relay.silent = True
        else:
            relay.refuse()
        token = owner_token.read(run / ".owner")
        assert token is not None
        os.kill(token.pid, signal.SIGKILL)
        before = metrics(run)[-1]["step"]
        wait(lambda: metrics(run)[-1]["step"] > before + 40, "steps after the kill")
        wait(lambda: metrics(run)[-1]["world_size"] == 2, "new rank")
        if outage == "refused":
            wait(lambda: "training continues" in job.output(), "a word on the mirror")
            relay.answer()
            last = metrics(run)[-1]["step"]
            wait(lambda: uploaded(last), "upload after the outage")
        job.send(signal.SIGTERM)
        done = job.wait(SECONDS)
    finally:
        job.kill()
    assert done.returncode == EXIT_PREEMPTED, done
    assert outage == "refused" or "has not finished after 1 s" in done.stderr, done
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    starts = [event for event in events if event["event"] == "start"]
    assert [start["source"] for start in starts[1:]] == ["memory", "memory"], "no state was lost"
