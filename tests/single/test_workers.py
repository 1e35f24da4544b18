"""loader.workers: the same samples and random numbers, and no worker outlives its rank."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from hvdtrain.config import Config
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig, LoaderConfig
from hvdtrain.data.loader import Loading, TrainLoader
from hvdtrain.errors import UserError
from hvdtrain.run.data import build_datasets
from hvdtrain.runtime.mesh import Group
from hvdtrain.tasks import Datasets
from tests.support.runs import REPOSITORY, environment, losses, train

SIZE = 37


class _Drawing(Dataset[Tensor]):
    """A dataset whose samples contain random numbers of all three generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()), np.random.rand(), random.random()])


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


def test_workers_refuse_an_iterable_dataset_without_a_state() -> None:
    class Stream(IterableDataset[Tensor]):
        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(1)

    class Task:
        def datasets(self) -> Datasets:
            return Datasets(Stream())

    with pytest.raises(UserError, match=r"loader\.workers 2: .* without state_dict"):
        build_datasets(Task(), Config(loader=LoaderConfig(2)))  # type: ignore[arg-type]


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
