"""Choice of a rank's GPU, and seeds. CUDA is simulated: a rank's GPUs are given as UUIDs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hvdtrain.errors import UserError
from hvdtrain.runtime import device
from hvdtrain.runtime.device import seed_all
from hvdtrain.runtime.mesh import Topology

ALL = ["a", "b"]
TWO_HOSTS = ("node1", "node1", "node2", "node2")


def _choose(
    monkeypatch: pytest.MonkeyPatch, rank: int, visible: list[list[str]], built: bool = True
) -> torch.device:
    """Return the device of one rank of 4 on two hosts; `visible`: GPUs that each rank sees."""
    seen = visible[rank]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=seen[gpu])
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(device.hvd, "nccl_built", lambda: built)
    monkeypatch.setattr(device.hvd, "cuda_built", lambda: built)

    def gather(mine: list[str], name: str) -> list[list[str]]:
        assert mine == (seen if built else [])
        return visible

    monkeypatch.setattr(device, "gather_json", gather)
    return device.choose_device(Topology(rank, 4, rank % 2, 2, TWO_HOSTS))


@pytest.mark.parametrize("rank", range(4))
def test_ranks_that_see_all_gpus_use_one_each(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    device = _choose(monkeypatch, rank, [ALL, ALL, ["c", "d"], ["c", "d"]])
    assert device == torch.device("cuda", rank % 2)


@pytest.mark.parametrize("rank", range(4))
def test_rank_that_sees_only_its_own_gpu_uses_it(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    device = _choose(monkeypatch, rank, [["a"], ["b"], ["c"], ["d"]])
    assert device == torch.device("cuda", 0)


def test_second_rank_on_a_host_with_one_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = [["a"], ["a"], ["c"], ["d"]]
    assert _choose(monkeypatch, 0, visible) == torch.device("cuda", 0)
    with pytest.raises(UserError, match="node1 has 1 GPUs, but 2 ranks"):
        _choose(monkeypatch, 1, visible)


def test_identical_gpu_uuids_on_different_hosts_are_distinct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Virtual machines of one image can report the same UUIDs: only a host's own ranks count.
    assert _choose(monkeypatch, 3, [["a"], ["b"], ["a"], ["b"]]) == torch.device("cuda", 0)


def test_rank_without_a_gpu_uses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _choose(monkeypatch, 0, [[], ["b"], ["c"], ["d"]]) == torch.device("cpu")


def test_horovod_without_gpu_support_uses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = [ALL, ALL, ["c", "d"], ["c", "d"]]
    assert _choose(monkeypatch, 0, visible, built=False) == torch.device("cpu")


@pytest.mark.parametrize("key", [(1234, 3, 0, 3), (0, 0, 0), (2**40 + 7, 5, 1)])
def test_random_numbers_of_a_micro_batch_are_those_of_earlier_versions(
    key: tuple[int, ...],
) -> None:
    seed_all(*key)
    drawn = (torch.rand(1).item(), np.random.rand(), random.random())
    first, second = map(int, np.random.SeedSequence(key).generate_state(2, dtype=np.uint32))
    seed = first << 31 ^ second
    expected = torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()
    assert drawn == (
        expected,
        np.random.RandomState(first).rand(),
        random.Random(seed).random(),
    )
