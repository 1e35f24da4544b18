"""checkpoint.mirror against a real S3 server: complete, or named and not used."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain import cli
from hvdtrain.checkpoint import mirror as mirror_module
from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.checkpoint.format import Checkpoint
from hvdtrain.checkpoint.manager import CheckpointManager
from hvdtrain.checkpoint.mirror import Mirror, ObjectStore, check_mirror
from hvdtrain.errors import UserError
from tests.support.runs import REPOSITORY, TINY, losses, metrics, run, train, weights
from tests.support.s3 import BUCKET, S3Server, s3_server
from tests.support.slow_store import SECONDS

STARTED = 1.7e9
FLAGS = ["--schedule.name", "constant", "--checkpoint.every", "2"]
EXACT = [*FLAGS, "--exchange.name", "exact", "--runtime.threads", "1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


class Mirrored:
    """A run directory whose checkpoints are mirrored, without ranks."""

    def __init__(self, run: Path, url: str, keep: int = 2, **config: Any) -> None:
        self.run, self.url = run, url
        self.events: list[dict[str, Any]] = []
        kept = CheckpointConfig(keep=keep, **config)
        self.mirror = Mirror(run, url, kept, job=id(self))
        self.manager = CheckpointManager(
            run / "checkpoints", keep, keep_best=kept.keep_best, mirror=self.mirror
        )

    def open(self, resumed_at: int = 0) -> Mirrored:
        def emit(event: str, **fields: Any) -> None:
            self.events.append({"event": event, **fields})

        self.mirror.open(STARTED, resumed_at, emit)
        return self

    def save(self, step: int, loss: float | None = None) -> None:
        (self.run / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(step)))
        tensors = {"w": torch.full((1000,), float(step))}
        parts = {"model": tensors, "optimizer": {"w/exp_avg": tensors["w"] + 1}}
        evaluations = [] if loss is None else [[step, loss]]
        self.manager.save(Checkpoint(parts, {"step": step, "evaluations": evaluations}))

    def wait(self) -> None:
        assert self.mirror.wait(60)

    def names(self, event: str) -> list[int]:
        return [found["step"] for found in self.events if found["event"] == event]


Make = Callable[..., Mirrored]


@pytest.fixture
def mirrored(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Return a maker of `Mirrored`; all share the run ID "run" and one prefix in the bucket."""
    made: list[Mirrored] = []
    prefix = f"s3://{BUCKET}/{request.node.name}"

    def make(where: str, url: str = prefix, **config: Any) -> Mirrored:
        made.append(Mirrored(tmp_path / where / "run", url, **config))
        made[-1].run.mkdir(parents=True, exist_ok=True)
        return made[-1]

    yield make
    for one in made:
        one.mirror.close()


def _steps(one: Mirrored) -> list[int]:
    """Steps of the complete checkpoints in the mirror."""
    found = (name.split("/") for name in ObjectStore(one.url).sizes())
    return sorted(int(path[0][5:]) for path in found if path[1:] == ["complete"])


def _key(one: Mirrored, name: str) -> str:
    return f"{one.url}/{name}".removeprefix(f"s3://{BUCKET}/")


def test_run_without_its_directory_resumes_bitwise_from_the_mirror(
    server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = ["--checkpoint.mirror", f"s3://{BUCKET}/whole"]
    first = train(tmp_path, "run", [*EXACT, *mirror, "--train.duration", "4"])
    assert [n for n in server.objects("whole/") if n.endswith("/complete")] == [
        f"whole/step_{step:08}/complete" for step in (2, 4)
    ]
    shutil.rmtree(first)
    where = ["--run.root", str(tmp_path), "--run.id", "run", "--train.duration", "8"]
    done = run(tmp_path / "output", [*TINY, *where, *EXACT, *mirror], "mpirun:2")
    assert done.returncode == 0, done
    assert f"restored the checkpoint of step 4 and the run's records from {mirror[1]}" in (
        done.stderr + done.stdout
    )
    plain = train(tmp_path, "plain", [*EXACT, "--train.duration", "8"])
    assert [line["step"] for line in metrics(first)] == list(range(1, 9))
    assert losses(first) == losses(plain)
    assert weights(first, 8) == weights(plain, 8)
    manifest = json.loads((first / "manifest.json").read_text())
    assert [start["step"] for start in manifest["starts"]] == [0, 4]
    events = [json.loads(line) for line in (first / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "end"] == [4, 8]
    assert [e["step"] for e in events if e["event"] == "restored"] == [4]
    assert [e["step"] for e in events if e["event"] == "mirrored"][-1] == 8
    assert cli.main(["audit", str(first)]) == 0, capsys.readouterr()
    for path in first.rglob("*"):
        if path.is_file():
            assert server.env["AWS_SECRET_ACCESS_KEY"].encode() not in path.read_bytes(), path


@pytest.mark.soak
def test_files_of_all_ranks_are_mirrored_and_restored(server: S3Server, tmp_path: Path) -> None:
    zero = [*FLAGS, "--parallel.shard.stage", "1"]
    mirror = ["--checkpoint.mirror", f"s3://{BUCKET}/zero"]
    train(tmp_path, "run", [*zero, *mirror, "--train.duration", "4"], "mpirun:2")
    shutil.rmtree(tmp_path / "run")
    again = train(tmp_path, "run", [*zero, *mirror, "--train.duration", "6"], "mpirun:2")
    plain = train(tmp_path, "plain", [*zero, "--train.duration", "6"], "mpirun:2")
    assert losses(again) == losses(plain)
    assert weights(again, 6, files=3) == weights(plain, 6, files=3)


_KILLED = """
import os, signal, sys
from pathlib import Path
from hvdtrain.checkpoint import mirror
from hvdtrain.checkpoint.config import CheckpointConfig
whole = mirror.ObjectStore.send
def send(self, path, wanted, name):
    sent = whole(self, path, wanted, name)
    if path.name == "optimizer.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
    return sent
mirror.ObjectStore.send = send
run, url = sys.argv[1:]
made = mirror.Mirror(Path(run), url, CheckpointConfig(keep=2), 7)
made.open(1.7e9, 0, lambda *_, **__: None)
made.wait(60)
"""


def test_killed_upload_is_not_a_checkpoint_and_continues(server: S3Server, mirrored: Make) -> None:
    one = mirrored("first")
    one.save(2)
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(one.run), one.url],
        cwd=REPOSITORY,
        timeout=60,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert _key(one, "step_00000002/optimizer.safetensors") in server.objects()
    assert _steps(one) == []
    other = mirrored("other")
    other.mirror.restore(None, fresh=False)
    assert not list((other.run / "checkpoints").glob("*"))
    one.open().wait()
    (event,) = one.events
    assert event["event"] == "mirrored" and event["step"] == 2
    assert event["bytes"] > 8000 and event["sent_bytes"] < 1000  # only state.json and the records
    other.mirror.restore(None, fresh=False)
    assert other.mirror.restored == {**other.mirror.restored, "step": 2}
    restored = other.run / "checkpoints/step_00000002/optimizer.safetensors"
    saved = one.run / "checkpoints/step_00000002/optimizer.safetensors"
    assert restored.read_bytes() == saved.read_bytes()
    assert (other.run / "metrics.jsonl").read_text().count("\n") == 2


def test_damaged_object_is_named_and_the_one_before_it_used(
    server: S3Server, mirrored: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one = mirrored("first").open()
    for step in (2, 4):
        one.save(step)
        one.wait()
    server.flip_last_bit(_key(one, "step_00000004/optimizer.safetensors"))
    other = mirrored("other")
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        other.mirror.restore(None, fresh=False)
    name = f"{one.url}/step_00000004: optimizer.safetensors was altered (checksum differs)"
    assert name in caplog.text
    assert other.mirror.restored is not None and other.mirror.restored["step"] == 2
    assert [p.name for p in (other.run / "checkpoints").iterdir()] == ["step_00000002"]
    other.open(resumed_at=2).wait()  # the run continues from step 2
    assert _steps(one) == [2]
    server.client.delete_object(Bucket=BUCKET, Key=_key(one, "step_00000002/model.safetensors"))
    with pytest.raises(UserError, match=r"no checkpoint in s3.* is intact \(step_00000002\)"):
        mirrored("third").mirror.restore(None, fresh=False)


def test_damaged_local_checkpoint_is_replaced_and_never_uploaded(
    mirrored: Make, tmp_path: Path
) -> None:
    one = mirrored("first", f"file://{tmp_path}/mirror").open()
    one.save(2)
    one.wait()
    path = one.run / "checkpoints/step_00000002/model.safetensors"
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + b"?")
    found = one.manager.newest()
    assert found is not None and found.state["step"] == 2 and path.read_bytes() == intact
    one.mirror.close()
    other = mirrored("first", f"file://{tmp_path}/mirror")
    other.save(4)
    damaged = other.run / "checkpoints/step_00000004/model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    other.open(resumed_at=4).wait()
    assert _steps(one) == [2] and other.names("mirror_failed") == [4]
    assert "model.safetensors was altered" in other.events[0]["error"]


def test_mirror_keeps_the_newest_and_the_best(server: S3Server, mirrored: Make) -> None:
    one = mirrored("first", keep_best=True).open()
    for step, loss in ((4, 1.0), (6, 2.0), (8, 2.5), (10, 2.2)):
        one.save(step, loss)
        one.wait()
    assert _steps(one) == [4, 8, 10]
    one.mirror.close()
    again = mirrored("first", keep_best=True).open(resumed_at=10)
    again.save(12, 2.1)
    again.wait()
    assert _steps(one) == [4, 10, 12]
    kept = {json.loads(server.get(_key(one, f"step_{n:08}/records.json")))["metrics.jsonl"][0]
            for n in (4, 10, 12)}  # fmt: skip
    there = {name.rpartition("/")[2] for name in server.objects(_key(one, "records/"))}
    assert there == kept


def test_unavailable_store_is_reported_once_and_later_ones_are_sent(
    mirrored: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "_RETRY_SECONDS", (0.01, 0.01))
    one = mirrored("first", f"file://{tmp_path}/mirror").open()
    one.wait()
    whole = ObjectStore.send
    attempts = []

    def refused(*arguments: Any) -> int:
        attempts.append(arguments)
        raise ConnectionError("unreachable")

    monkeypatch.setattr(ObjectStore, "send", refused)
    one.save(2)
    one.wait()
    assert len(attempts) == 3 and one.names("mirror_failed") == [2] and one.mirror.failures == 1
    monkeypatch.setattr(ObjectStore, "send", whole)
    one.save(4)
    one.wait()
    assert one.names("mirrored") == [4] and _steps(one) == [4]


def test_second_writer_stops_the_first_and_other_runs_are_refused(
    mirrored: Make, tmp_path: Path
) -> None:
    one = mirrored("first", f"file://{tmp_path}/mirror").open()
    one.save(2)
    one.wait()
    with pytest.raises(UserError, match="holds the run \"run\", not 'other'"):
        check_mirror(one.url, "other")
    local = mirrored("local", f"file://{tmp_path}/mirror")  # the same ID, but another run
    local.save(1)
    with pytest.raises(UserError, match="holds another run of the ID run, which began at"):
        local.mirror.restore(STARTED + 1, fresh=False)
    with pytest.raises(UserError, match=r"already contains this run, and run\.resume is never"):
        mirrored("fresh", f"file://{tmp_path}/mirror").mirror.restore(None, fresh=True)
    other = mirrored("other", f"file://{tmp_path}/mirror")
    other.mirror.restore(None, fresh=False)
    other.open(resumed_at=2).wait()
    one.save(4)
    one.wait()
    assert one.names("mirror_lost") == [4] and _steps(one) == [2]
    other.save(6)
    other.wait()
    assert _steps(one) == [2, 6]


def test_large_files_are_verified_by_etag_without_reading_them_back(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "_S3_PART", 5 << 20)
    for size in (3 << 20, 11 << 20):
        path = tmp_path / f"{size}.safetensors"
        path.write_bytes(bytes(size))
        bucket = ObjectStore(f"s3://{BUCKET}/large")
        wanted = {"bytes": size, "sha256": mirror_module.sha256_of(path)}
        monkeypatch.setattr(bucket._fs, "open", None)
        assert bucket.send(path, wanted, path.name) == size
        assert bucket.send(path, wanted, path.name) == 0
    assert (
        b"-3" in server.client.head_object(Bucket=BUCKET, Key=f"large/{path.name}")["ETag"].encode()
    )


def test_unusable_mirror_ends_with_one_message_before_the_run(
    server: S3Server, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"mirror s3://missing/run cannot be written \(.*exist"):
        check_mirror("s3://missing/run", "run")
    url = f"s3://{BUCKET}/run"
    where = ["--run.root", str(tmp_path / "runs"), "--run.id", "run", "--checkpoint.mirror", url]
    env = {**server.env, "AWS_ACCESS_KEY_ID": "AKIAWRONG"}
    done = run(tmp_path / "output", [*TINY, *where], "mpirun:2", env=env)
    assert done.returncode == 2, done
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert f"checkpoint.mirror {url} cannot be written (" in line, done
    assert not (tmp_path / "runs/run").exists()


def test_slow_store_delays_neither_steps_nor_the_end(tmp_path: Path) -> None:
    flags = [
        *("--task", "tests.support.slow_store:SlowlyMirrored", "--telemetry.port", "0"),
        *("--run.root", str(tmp_path), "--run.id", "run", "--checkpoint.every", "2"),
        *("--checkpoint.mirror", f"file://{tmp_path}/mirror"),
        *("--checkpoint.mirror_wait_seconds", "1"),
    ]
    done = run(tmp_path / "output", flags, "mpirun:2")
    assert done.returncode == 0 and done.seconds < SECONDS / 3, done
    assert "waiting up to 1 s for the upload to file://" in done.stderr, done
    assert "has not finished after 1 s; the mirror has no checkpoint" in done.stderr, done
    assert (tmp_path / "run/checkpoints/step_00000010/complete").exists()
    assert max(line["step_seconds"] for line in metrics(tmp_path / "run")) < SECONDS / 3
    assert not list((tmp_path / "mirror").glob("*/complete"))


@pytest.mark.parametrize(
    "address", ["s3://key:secret@bucket/run", "s3://bucket/run?token=secret", "bucket/run", "s3://"]
)
def test_addresses_with_secrets_or_without_a_scheme_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.mirror") as refused:
        CheckpointConfig(mirror=address)
    assert "secret" not in str(refused.value)


def test_directory_as_a_mirror_has_no_leftovers(mirrored: Make, tmp_path: Path) -> None:
    one = mirrored("first", f"file://{tmp_path}/mirror").open()
    for step in (2, 4, 6):
        one.save(step)
        one.wait()
    left = tmp_path / "mirror/step_00000008"  # of an upload that was killed
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"?")
    one.save(10)
    one.wait()
    names = sorted(path.name for path in (tmp_path / "mirror").iterdir())
    assert names == ["records", "run.json", "step_00000006", "step_00000010"]


def test_local_checkpoints_beyond_those_to_keep_are_not_uploaded(
    mirrored: Make, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/mirror"
    before = mirrored("first", url, keep=3)
    for step in (2, 4, 6):
        before.save(step)
    one = mirrored("first", url, keep=2).open(resumed_at=6)
    one.wait()
    assert _steps(one) == [4, 6] and one.names("mirrored") == [6, 4]


def test_checkpoint_that_a_run_leaves_while_it_trains_is_replaced(
    mirrored: Make, tmp_path: Path
) -> None:
    one = mirrored("first", f"file://{tmp_path}/mirror").open()
    for step, loss in ((2, 1.0), (4, 2.0)):
        one.save(step, loss)
        one.wait()
    one.manager.supersede(after=2)  # as after a loss spike
    one.wait()
    assert _steps(one) == [2] and one.mirror.newest_step == 2
    one.save(4, 3.0)
    one.wait()
    assert _steps(one) == [2, 4]
    state = json.loads((tmp_path / "mirror/step_00000004/state.json").read_text())
    assert state["evaluations"] == [[4, 3.0]]
