"""Asynchronous checkpoints: steps do not wait, failures do not end training, all are complete."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hvdtrain.checkpoint import tensor_file, writer
from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.checkpoint.format import Checkpoint, SharedDirectory, read
from hvdtrain.checkpoint.layout import (
    DamagedError,
    delete,
    finished,
    hidden_name,
    leftovers,
    verify,
)
from hvdtrain.checkpoint.manager import CheckpointManager
from hvdtrain.checkpoint.writer import CheckpointWriter
from hvdtrain.engine.callbacks.checkpoint import SaveCheckpoints, Saving
from hvdtrain.engine.state import ALONE
from hvdtrain.runtime.init import initialize
from hvdtrain.runtime.mesh import Group
from hvdtrain.runtime.phases import PhaseTimer
from tests.support.job import Finished
from tests.support.runs import REPOSITORY, TINY, metrics, run, start
from tests.support.thread_ranks import exchange, on_ranks

LIMIT = 20.0  # time limit for operations of milliseconds


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    """Replace the ranks' wait for the last save by one rank's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CONTROLLER", "gloo")
        patch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
        initialize()
        yield


class Disk:
    """Block the saves of this process in their fsync until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.free.set()
        fsync = os.fsync

        def slow(file: int) -> None:
            self.free.wait(LIMIT)
            fsync(file)

        monkeypatch.setattr(tensor_file.os, "fsync", slow)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.free.set()


class Training:
    """A loop that only counts; its only weight is the step."""

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        steps: int = 1000,
        grace_seconds: float = 0.0,
    ) -> None:
        self.weight = torch.zeros(1)
        self.writer = CheckpointWriter(CheckpointManager(root, config.keep), saved=0)
        self.loop: Any = SimpleNamespace(
            progress=SimpleNamespace(step=0),
            preempted=False,
            asked_to_stop_at=0.0,
            ending=False,
            ranks_in_sync=True,
        )
        self._steps = steps
        state: Any = SimpleNamespace(capture=self._capture, of_scope=lambda *_: [])
        saving = Saving(state, ALONE, self.writer, lambda: None)
        self.callback = SaveCheckpoints(config, grace_seconds, saving, PhaseTimer(0.0))

    def _capture(self, *_: object) -> Checkpoint:
        return Checkpoint({"model": {"weight": self.weight}}, {"step": self.loop.progress.step})

    def step(self, preempted: bool = False) -> None:
        self.weight += 1
        progress = self.loop.progress
        progress.step += 1
        self.loop.preempted = preempted
        self.loop.asked_to_stop_at = time.monotonic()
        self.loop.ending = preempted or progress.step == self._steps
        self.callback.on_step(self.loop, {})

    def steps(self, number: int) -> None:
        """Run steps, each save completed before the next step."""
        for _ in range(number):
            self.step()
            assert self.writer.wait(time.monotonic() + LIMIT)


class _Shard:
    """One of two ranks that each save a shard; the disk of rank 1 is full."""

    def __init__(self, root: Path, rank: int, last: int) -> None:
        self._rank, self._last = rank, last
        manager: Any = CheckpointManager(root, 1) if rank == 0 else self
        self._writer = CheckpointWriter(manager)
        self._loop: Any = SimpleNamespace(
            progress=SimpleNamespace(step=0), preempted=False, ending=False, ranks_in_sync=True
        )
        state: Any = SimpleNamespace(capture=self._capture, of_scope=lambda *_: ["optimizer"])
        saving = Saving(state, Group(rank, 2), self._writer, lambda: None)
        config = CheckpointConfig(every=2)
        self._callback = SaveCheckpoints(config, 0.0, saving, PhaseTimer(0.0))

    def has(self, step: int) -> bool:
        return False

    def save(self, checkpoint: Checkpoint) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def _capture(self, group: Group, directory: str = "") -> Checkpoint:
        names = ["optimizer.rank_00000", "optimizer.rank_00001"]
        others = (names[1],) if self._rank == 0 else ()
        parts = {names[self._rank]: {"weight": torch.ones(1)}}
        step = self._loop.progress.step
        return Checkpoint(
            parts, {"step": step}, SharedDirectory(directory, others) if directory else None
        )

    def run(self) -> str:
        """Run steps until rank 0's save has ended; return its messages."""
        deadline = time.monotonic() + LIMIT
        for step in range(1, 100_000):
            self._loop.progress.step, self._loop.ending = step, step == self._last
            self._callback.on_step(self._loop, {})
            error = self._writer.error if self._rank == 0 else None
            late = time.monotonic() > deadline
            if self._loop.ending or exchange("ended", bool(error) or late)[0]:
                break
            time.sleep(0.01)
        return str(self._writer.error)


@pytest.mark.parametrize("last", [1, 0], ids=["last checkpoint", "checkpoint between steps"])
def test_failed_write_of_a_shard_fails_the_checkpoint_on_rank_0(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "hvdtrain.engine.callbacks.checkpoint"
    monkeypatch.setattr(f"{module}.sum_", lambda values, name: sum(exchange(name, values)))
    monkeypatch.setattr(f"{module}.gather_json", lambda value, name: exchange(name, value))
    monkeypatch.setattr(f"{module}.broadcast_json", lambda value, name: exchange(name, value)[0])
    began = time.monotonic()
    ranks = [_Shard(tmp_path, rank, last) for rank in range(2)]
    said, _ = on_ranks([rank.run for rank in ranks])
    assert said == "[Errno 5] rank 1: [Errno 28] No space left on device"
    assert time.monotonic() - began < LIMIT, "it waited for the files of rank 1"
    assert finished(tmp_path) == []


def _saved(root: Path) -> dict[int, float]:
    """Return step -> weight in its checkpoint."""
    return {
        checkpoint.state["step"]: float(checkpoint.parts["model"]["weight"])
        for checkpoint in map(read, finished(root))
    }


def test_slow_disk_delays_no_step_and_saves_consistent_state(tmp_path: Path, disk: Disk) -> None:
    training = Training(tmp_path, CheckpointConfig(every=4, keep=9))
    training.steps(3)
    disk.free.clear()
    for _ in range(10):  # a waiting step would take LIMIT
        training.step()
    assert training.writer.busy and _saved(tmp_path) == {}
    disk.free.set()
    assert training.writer.wait(time.monotonic() + LIMIT)
    # The saves of 8 and 12 were delayed; the newest state is saved for them.
    training.steps(3)
    assert _saved(tmp_path) == {4: 4.0, 14: 14.0, 16: 16.0}
    assert training.writer.failures == 0 and training.writer.last_saved_step == 16


def test_save_that_blocks_the_next_one_warns_once(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, CheckpointConfig(every=1))
    disk.free.clear()
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        for _ in range(5):
            training.step()
    assert (
        len(caplog.records) == 1
        and "the checkpoint of step 1 is still being written" in caplog.text
    )


def test_saved_step_is_not_rewritten_after_a_new_rendezvous(tmp_path: Path) -> None:
    training = Training(tmp_path, CheckpointConfig(every=2))
    training.steps(2)
    first = finished(tmp_path)[0].stat().st_ino
    training.callback.on_step(training.loop, {})
    assert not training.writer.busy
    # Another process became rank 0, without a writer that knows of this save.
    other = Training(tmp_path, CheckpointConfig(every=2))
    other.loop = training.loop
    other.callback.on_step(other.loop, {})
    assert other.writer.wait(time.monotonic() + LIMIT)
    assert finished(tmp_path)[0].stat().st_ino == first and other.writer.last_saved_step == 2


def test_every_seconds_saves_once_per_interval(tmp_path: Path) -> None:
    training = Training(tmp_path, CheckpointConfig(every=0, every_seconds=0.4))
    training.steps(3)
    assert _saved(tmp_path) == {}
    time.sleep(0.5)
    training.steps(3)
    assert _saved(tmp_path) == {4: 4.0}


def test_run_waits_until_its_last_step_is_saved(tmp_path: Path, disk: Disk) -> None:
    training = Training(tmp_path, CheckpointConfig(every=4), steps=5)
    training.steps(3)
    disk.free.clear()
    training.step()
    threading.Timer(0.3, disk.free.set).start()
    training.step()
    assert _saved(tmp_path) == {4: 4.0, 5: 5.0} and training.callback.error is None


def test_pending_last_save_times_out_with_an_error(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "TIMEOUT_S", 0.2)
    training = Training(tmp_path, CheckpointConfig(every=4), steps=4)
    disk.free.clear()
    for _ in range(4):
        training.step()
    assert isinstance(training.callback.error, TimeoutError)
    assert "step 4 is still being written" in str(training.callback.error)


def test_failed_save_is_counted_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoints"
    root.write_bytes(b"")  # no user, including root, can create a directory below a file
    training = Training(root, CheckpointConfig(every=2), steps=10)
    with caplog.at_level(logging.ERROR, "hvdtrain"):
        training.steps(4)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "checkpoint of step 2 could not be written" in caplog.text
    assert training.writer.failures == 2 and training.writer.last_saved_step == 0
    root.unlink()
    training.steps(2)
    assert _saved(root) == {6: 6.0}
    root.rename(tmp_path / "away")
    root.write_bytes(b"")
    training.steps(4)
    assert isinstance(training.callback.error, OSError)


@pytest.mark.parametrize("grace_seconds", [0.0, 60.0])
def test_preempted_run_saves_its_state(tmp_path: Path, grace_seconds: float) -> None:
    training = Training(tmp_path, CheckpointConfig(every=0), grace_seconds=grace_seconds)
    training.steps(2)
    training.step(preempted=True)
    assert _saved(tmp_path) == {3: 3.0} and training.callback.error is None


def test_save_longer_than_the_grace_period_is_not_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, CheckpointConfig(every=2), grace_seconds=5.0)
    training.steps(2)
    training.writer.seconds = 6.0
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        training.step(preempted=True)
    assert _saved(tmp_path) == {2: 2.0} and training.callback.error is None
    assert "does not fit" in caplog.text and "the newest checkpoint is of step 2" in caplog.text


def test_save_in_progress_is_finished_within_the_grace_period(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, CheckpointConfig(every=2), grace_seconds=5.0)
    training.steps(2)
    disk.free.clear()
    training.step()
    training.step()
    training.writer.seconds = 3.0  # two do not fit, the one in progress does
    threading.Timer(0.3, disk.free.set).start()
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        training.step(preempted=True)
    assert _saved(tmp_path) == {2: 2.0, 4: 4.0} and training.callback.error is None
    assert "the newest checkpoint is of step 4" in caplog.text


def test_slow_save_is_abandoned_at_the_end_of_the_grace_period(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, CheckpointConfig(every=2), grace_seconds=0.5)
    disk.free.clear()
    begin = time.monotonic()
    training.step(preempted=True)
    assert 0.4 < time.monotonic() - begin < 5.0
    assert "there is no checkpoint" in caplog.text and training.callback.error is None


def test_tied_and_noncontiguous_tensors_are_snapshotted(tmp_path: Path) -> None:
    shared = torch.arange(12.0).view(3, 4)
    model = {"a": shared, "tied": shared, "turned": shared.t(), "part": shared[1:, :2]}
    saver = CheckpointWriter(CheckpointManager(tmp_path, 1), saved=0)
    saver.start(Checkpoint({"model": model}, {"step": 1}), before=lambda: None)
    expected = {name: tensor.clone() for name, tensor in model.items()}
    shared.zero_()
    assert saver.wait(time.monotonic() + LIMIT)
    found = read(finished(tmp_path)[0]).parts["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_staging_buffer_grows_with_the_model(tmp_path: Path) -> None:
    saver = CheckpointWriter(CheckpointManager(tmp_path, 9), saved=0)
    for step in (1, 2):
        tensors = {"weight": torch.full((step,), float(step))}
        saver.start(Checkpoint({"model": tensors}, {"step": step}), before=lambda: None)
        assert saver.wait(time.monotonic() + LIMIT)
    found = [read(path).parts["model"]["weight"].tolist() for path in finished(tmp_path)]
    assert found == [[1.0], [2, 2]]


def _one_of_each() -> dict[str, Tensor]:
    tensors = {f"of {dtype}": torch.arange(5).to(dtype) for dtype in tensor_file._DTYPES.values()}
    return tensors | {"scalar": torch.tensor(7), "none": torch.empty(0, 3)}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        (a[k].shape, a[k].dtype) == (b[k].shape, b[k].dtype)
        and torch.equal(a[k].reshape(-1).view(torch.uint8), b[k].reshape(-1).view(torch.uint8))
        for k in a
    )


def test_tensor_files_are_interoperable_with_safetensors(tmp_path: Path) -> None:
    tensors = _one_of_each()
    tensor_file.write_tensors(tmp_path / "ours", tensors)
    assert _same(load_file(tmp_path / "ours"), tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert _same(tensor_file.unpack(tensor_file.read_file(tmp_path / "theirs")[0]), tensors)


def _leave(root: Path, host: str, process: int, age: float) -> Path:
    name = hidden_name(root / "step_00000007").name.split(".")
    directory = root / f".step_00000007.{host}.{process}.{name[-2]}.tmp"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"half")
    for path in (directory / "model.safetensors", directory):
        os.utime(path, (time.time() - age,) * 2)
    return directory


def test_only_leftovers_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    here = os.uname().nodename
    with subprocess.Popen(["true"]) as gone:
        gone.wait(LIMIT)
    left = [_leave(tmp_path, here, gone.pid, 0), _leave(tmp_path, "other.host", 1, 7200)]
    kept = [_leave(tmp_path, here, os.getppid(), 0), _leave(tmp_path, "other.host", 1, 60)]
    for directory in leftovers(tmp_path):
        delete(directory)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)
    assert finished(tmp_path) == []


def _identity(directory: Path) -> int | None:
    with suppress(FileNotFoundError):
        return directory.stat().st_ino
    return None


@pytest.mark.soak
def test_concurrent_saves_of_the_same_steps_stay_intact(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from hvdtrain.checkpoint.format import Checkpoint\n"
        "from hvdtrain.checkpoint.manager import CheckpointManager\n"
        "manager = CheckpointManager(Path(sys.argv[1]), 2)\n"
        "for step in range(1, 40):\n"
        "    weight = torch.full((1000,), float(step))\n"
        "    try:\n"
        "        manager.save(Checkpoint({'model': {'weight': weight}}, {'step': step // 3}))\n"
        "    except OSError as error:\n"
        "        print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen(command, cwd=REPOSITORY) for _ in range(2)]
    seen = 0
    while any(process.poll() is None for process in both):
        for directory in finished(tmp_path):
            before = _identity(directory)
            try:
                verify(directory)
                seen += 1
            except DamagedError:  # it may have been deleted, but must not exist and be damaged
                assert _identity(directory) != before or before is None
    assert [process.wait(LIMIT) for process in both] == [0, 0] and seen
    names = [path.name for path in finished(tmp_path)]
    assert names == ["step_00000012", "step_00000013"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


FLAGS = [
    *("--batch.global_size", "8", "--batch.micro_size", "8", "--eval.every", "0"),
    *("--telemetry.port", "0", "--run.id", "case", "--checkpoint.every", "2"),
]


def test_hung_disk_stops_neither_training_nor_shutdown(tmp_path: Path) -> None:
    flags = [*FLAGS, "--task", "tests.support.tasks:BlockedDisk", "--run.root", str(tmp_path)]
    done = run(tmp_path / "output", flags, env={"HVDTRAIN_TEST_BLOCKED": "1"})
    assert done.returncode == 1, done
    assert [line["step"] for line in metrics(tmp_path / "case")] == list(range(1, 11))
    assert (
        "error: the last checkpoint could not be written: the checkpoint of step 2 is still"
        in done.stderr
    )
    assert "Traceback" not in done.stderr, done
    assert finished(tmp_path / "case/checkpoints") == []


def test_long_last_save_does_not_trigger_the_stall_shutdown(tmp_path: Path) -> None:
    # Rank 0 waits for its disk longer than Horovod lets ranks wait in a collective.
    flags = [*FLAGS, "--task", "tests.support.tasks:BlockedDisk", "--run.root", str(tmp_path)]
    env = {
        "HVDTRAIN_TEST_BLOCKED": "60:9",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4",
    }
    flags += ["--batch.micro_size", "4", "--checkpoint.every", "1000"]
    done = run(tmp_path / "output", flags, "mpirun:2", env)
    assert done.returncode == 0, done
    (last,) = finished(tmp_path / "case/checkpoints")
    assert read(last).state["step"] == 10


# A separate small disk, whose content is copied at the end.
_ON_A_SMALL_DISK = (
    'mount -t tmpfs -o size=400k tmpfs "$0" && { "$@"; code=$?; rm -f "$0/ballast";'
    ' cp -r "$0" "$0.after"; exit $code; }'
)


def _on_a_small_disk(root: Path, steps: str) -> Finished:
    disk = root / "disk"
    disk.mkdir()
    flags = [*FLAGS, "--task", "tests.support.tasks:FullDisk", "--run.root", str(disk)]
    command = ["unshare", "-m", "sh", "-c", _ON_A_SMALL_DISK, str(disk), sys.executable]
    env = {"HVDTRAIN_TEST_FULL": f"{disk}:{steps}"}
    train = [*command, "-m", "hvdtrain.train"]
    return start(root / "output", flags, env=env, command=train).wait(120)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts a disk")


@needs_root
def test_run_survives_a_temporarily_full_disk(tmp_path: Path) -> None:
    done = _on_a_small_disk(tmp_path, "4:7")
    assert done.returncode == 0, done
    case = tmp_path / "disk.after/case"
    assert [line["step"] for line in metrics(case)] == list(range(1, 11))
    assert "checkpoint of step 4 could not be written" in done.stderr, done
    assert "checkpoint of step 6 could not be written" in done.stderr, done
    assert "2 checkpoints could not be written" in done.stderr, done
    assert "Traceback" not in done.stderr, done
    names = [path.name for path in finished(case / "checkpoints")]
    assert names == ["step_00000002", "step_00000008", "step_00000010"]
    assert sorted(path.name for path in (case / "checkpoints").iterdir()) == names
    for directory in finished(case / "checkpoints"):
        verify(directory)


@needs_root
def test_full_disk_at_the_end_keeps_older_checkpoint_and_exits_with_1(tmp_path: Path) -> None:
    done = _on_a_small_disk(tmp_path, "4:99")
    assert done.returncode == 1, done
    assert "error: the last checkpoint could not be written: [Errno 28]" in done.stderr, done
    assert "Traceback" not in done.stderr, done
    (only,) = finished(tmp_path / "disk.after/case/checkpoints")
    assert read(only).state["step"] == 2


# The run's files so far are in a lower layer, such as a container's image.
_ON_AN_OVERLAY = (
    'mv "$0" "$0.lower" && mkdir "$0" "$0.disk" && mount -t tmpfs tmpfs "$0.disk" && '
    'mkdir "$0.disk/upper" "$0.disk/work" && mount -t overlay overlay -o '
    '"lowerdir=$0.lower,upperdir=$0.disk/upper,workdir=$0.disk/work" "$0" && { "$@"; code=$?; '
    'cp -r "$0" "$0.after"; exit $code; }'
)


@needs_root
def test_checkpoints_in_a_lower_layer_are_deleted_and_superseded(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    flags = [*FLAGS, *TINY, "--run.root", str(runs)]
    done = run(tmp_path / "output", [*flags, "--train.duration", "10"])
    assert done.returncode == 0, done
    older = finished(runs / "case/checkpoints")[0]
    command = ["unshare", "-m", "sh", "-c", _ON_AN_OVERLAY, str(runs), sys.executable]
    train = [*command, "-m", "hvdtrain.train"]
    flags += ["--train.duration", "14", "--run.resume", str(older)]
    done = start(tmp_path / "output", flags, command=train).wait(120)
    assert done.returncode == 0 and "could not be deleted" not in done.stderr, done
    after = Path(f"{runs}.after/case/checkpoints")
    assert [path.name for path in finished(after)] == [f"step_{n:08}" for n in (10, 12, 14)]
    for directory in finished(after):
        verify(directory)
