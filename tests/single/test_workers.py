"""loader.workers: the same samples and random numbers, and no worker outlives its rank."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig, LoaderConfig
from hvdtrain.data.loader import Loading, TrainLoader
from hvdtrain.data.workers import WorkerContext
from hvdtrain.errors import UserError
from hvdtrain.runtime.mesh import Group
from hvdtrain.runtime.signals import ASKING
from tests.support.job import poll, running_children
from tests.support.runs import REPOSITORY, TINY, environment, forked_train, losses, start, train

SIZE = 37


class _Drawing(Dataset[Tensor]):
    """A dataset whose samples contain random numbers of all three generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()), np.random.rand(), random.random()])


class _Large(_Drawing):
    """Samples whose memory is shared with the rank."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1 << 17)


class _Broken(_Drawing):
    def __getitem__(self, index: int) -> Tensor:
        raise UserError("sample 7 is broken: repair it")


def _loader(dataset: Dataset[Tensor], workers: int, rank: int = 0) -> TrainLoader:
    loading = Loading(LoaderConfig(workers))
    return TrainLoader(dataset, 0, BatchConfig(12, 2), Assignment(6, Group(rank, 2)), 5, loading)


def _steps(workers: int, rank: int) -> list[Tensor]:
    """Return the loaded samples, and a random number of each forward pass; reassigned in the third
    step."""
    loader = _loader(_Drawing(), workers, rank)
    found = []
    for step, counts in enumerate([(3, 3), (3, 3), (5, 1), (6, 0), (3, 3)]):
        loader.assignment.change(counts)
        for batch in loader.next_step(step):
            found += [batch, torch.rand(2)]
    loader.close()
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_workers_load_the_same_samples_and_random_numbers(rank: int) -> None:
    alone = _steps(0, rank)
    for workers in (1, 3):
        ahead = _steps(workers, rank)
        assert all(torch.equal(own, other) for own, other in zip(ahead, alone, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_broken_sample_in_a_worker_is_a_user_error(workers: int) -> None:
    with pytest.raises(UserError, match=r"^sample 7 is broken: repair it$"):
        next(_loader(_Broken(), workers).next_step(0))


def test_worker_survives_signals_to_its_group_and_ends_with_its_loader() -> None:
    others = {*multiprocessing.active_children()}
    loader = _loader(_Drawing(), 1)
    next(loader.next_step(0))
    [worker] = {*multiprocessing.active_children()} - others
    assert worker.pid is not None
    for number in ASKING:
        os.kill(worker.pid, number)
    for step in range(1, 9):
        next(loader.next_step(step))
    assert worker.is_alive()
    loader.close()
    assert not worker.is_alive()


def test_worker_that_survives_signals_is_ended_when_its_rank_exits() -> None:
    worker = WorkerContext().Process(target=time.sleep, args=(1000,), daemon=True)
    worker.start()
    worker.terminate()  # as multiprocessing does when the rank exits
    worker.join()
    assert worker.exitcode == -signal.SIGKILL


def test_program_that_a_worker_starts_can_be_ended_by_signals() -> None:
    class Decoded(_Drawing):
        def __getitem__(self, index: int) -> Tensor:
            decoder = subprocess.Popen(["sleep", "1000"])
            decoder.terminate()
            return torch.tensor(decoder.wait())

    assert next(_loader(Decoded(), 1).next_step(0)).tolist() == [-signal.SIGTERM] * 2


@pytest.mark.parametrize("launcher", ["", "gloo:2", "mpirun:2"])
def test_sigterm_to_all_processes_of_ranks_saves_the_last_step(
    tmp_path: Path, launcher: str
) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    flags = ["--task", "tests.support.tasks:SlowWhile", "--train.duration", "200"]
    where = ["--run.root", str(tmp_path), "--run.id", "run", "--loader.workers", "1"]
    env = {"HVDTRAIN_TEST_SLOW": f"0.05:{slow}"}
    ranks = int([*launcher.split(":"), "1"][1])
    command = forked_train(ranks)
    job = start(tmp_path / "out", [*TINY, *flags, *where], launcher, env, command)
    lines = tmp_path / "run" / "metrics.jsonl"
    poll(lambda: lines.exists() and lines.read_text().count("\n") > 1, 60, "two steps")
    groups = {
        os.getpgid(process.pid)
        for process in running_children(lambda process: str(tmp_path) in process.cmdline())
        if process.cmdline()[0] == "python"
    }
    assert len(groups) == ranks
    for group in groups:  # rank, workers and watchdog: `kill -TERM -- -GROUP`
        os.killpg(group, signal.SIGTERM)
    done = job.wait(60)
    assert done.returncode == 75, done
    said = r"asked to stop after step (\d+); the newest checkpoint is of step \1\b"
    [step] = re.findall(said, done.stdout + done.stderr)
    assert len(losses(tmp_path / "run")) == int(step)
    assert "watchdog ended" not in str(done)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_are_forked_whatever_start_method_the_script_sets(method: str) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        # A class of a function cannot be sent to a spawned process.
        class Local(_Drawing):
            pass

        assert len(next(_loader(Local(), 1).next_step(0))) == 2
    finally:
        multiprocessing.set_start_method(before, force=True)


_TENSORS = {
    "scalar": lambda: torch.tensor(1.5, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(3, 5).bfloat16(),
    "bool": lambda: torch.rand(7) > 0.5,
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "large conjugate": lambda: torch.randn(1 << 17, dtype=torch.complex64).conj(),
    "float8": lambda: torch.randn(8).to(torch.float8_e4m3fn),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
    "empty": lambda: torch.empty(0, 3),
    "large": lambda: torch.randn(1 << 17),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(3, 5).T,
    "gradient": lambda: torch.randn(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "one channel": lambda: torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last),
    "conjugate with gradient": lambda: (
        torch.randn(3, dtype=torch.complex64).conj().requires_grad_()
    ),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
}


def _bytes(tensor: Tensor) -> Tensor:
    """The values as bytes; torch.equal lacks some dtypes."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone().view(torch.uint8)


@pytest.mark.parametrize("name", _TENSORS)
def test_tensors_come_from_workers_as_the_dataset_made_them(name: str) -> None:
    class Made(_Drawing):
        def __getitem__(self, index: int) -> Any:
            return _TENSORS[name]()

    def batches(workers: int) -> list[Any]:
        loading = Loading(LoaderConfig(workers), collate=list)
        assigned = Assignment(1, Group(0, 1))
        loader = TrainLoader(Made(), 0, BatchConfig(2, 2), assigned, 5, loading)
        found = [batch for step in range(2) for batch in loader.next_step(step)]
        loader.close()
        return found

    for alone, ahead in zip(batches(0), batches(1), strict=True):
        for made, came in zip(alone, ahead, strict=True):
            assert type(came) is type(made)
            for fact in ("dtype", "layout", "requires_grad", "is_nested", "is_quantized"):
                assert getattr(came, fact) == getattr(made, fact)
            if made.layout is torch.strided and not made.is_nested:
                assert came.shape == made.shape
                assert came.stride() == made.stride() or made.is_neg()
                if not made.is_quantized:
                    assert torch.equal(_bytes(came), _bytes(made))
                    assert came.data_ptr() % 64 == 0
                    came.detach().zero_()  # writable
            elif not made.is_nested:
                assert torch.equal(came.to_dense(), made.to_dense())


def test_small_tensors_of_workers_need_no_descriptor_of_the_rank() -> None:
    loader = _loader(_Drawing(), 1)
    kept = [batch for step in range(50) for batch in loader.next_step(step)]
    assert kept and not any(batch.is_shared() for batch in kept)
    loader.close()


def test_worker_that_cannot_send_a_sample_ends_the_wait_of_its_rank() -> None:
    class Functions(_Drawing):
        def __getitem__(self, index: int) -> Any:
            return lambda: index

    loading = Loading(LoaderConfig(1), collate=list)
    loader = TrainLoader(Functions(), 0, BatchConfig(2, 2), Assignment(1, Group(0, 1)), 5, loading)
    with pytest.raises(UserError, match=r"cannot send a micro-batch .* \(AttributeError: "):
        next(loader.next_step(0))


def test_error_of_the_thread_that_passes_tensors_ends_the_wait() -> None:
    class Failing(_Drawing):
        def __getitem__(self, index: int) -> Tensor:
            # As multiprocessing.resource_sharer does if the process has no free descriptor.
            sys.excepthook(OSError, OSError("Too many open files"), None)
            raise AssertionError("the worker continues")

    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(_loader(Failing(), 1).next_step(0))


def test_workers_refuse_a_temporary_directory_with_a_long_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = 107 - len("/pymp-12345678/listener-12345678")
    fits = Path("/tmp", f"hvdtrain-{os.getpid()}".ljust(longest - len("/tmp/"), "x"))
    fits.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(fits))
    loader = _loader(_Large(), 1)
    try:
        assert len(next(loader.next_step(0))) == 2
    finally:
        loader.close()
        shutil.rmtree(fits)
    monkeypatch.setattr(tempfile, "tempdir", f"{fits}x")
    with pytest.raises(UserError, match=f"{longest + 1} bytes, .* allow {longest}: set TMPDIR to"):
        next(_loader(_Drawing(), 1).next_step(0))


def test_workers_end_when_their_rank_is_killed() -> None:
    program = (
        "import time, psutil\n"
        "from tests.single.test_workers import _Drawing, _loader\n"
        "next(_loader(_Drawing(), 2).next_step(0))\n"
        "print(*(child.pid for child in psutil.Process().children()), flush=True)\n"
        "time.sleep(60)\n"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert rank.stdout is not None
        workers = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(workers) == 2
        rank.send_signal(signal.SIGKILL)
        rank.wait(10)
        deadline = time.monotonic() + 2.0
        while any(_runs(pid) for pid in workers):
            assert time.monotonic() < deadline, "a worker is still there"
            time.sleep(0.02)
    finally:
        rank.kill()


def _runs(pid: int) -> bool:
    stat = Path("/proc", str(pid), "stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_run_with_workers_has_the_same_curve(tmp_path: Path) -> None:
    flags = ["--train.duration", "3"]
    plain = train(tmp_path, "plain", flags)
    ahead = train(tmp_path, "ahead", [*flags, "--loader.workers", "2"], "mpirun:2")
    assert losses(ahead) == pytest.approx(losses(plain), rel=1e-5)
