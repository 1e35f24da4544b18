"""Choice of a rank's GPU, kernels, and seeds. CUDA is simulated: GPUs are given as UUIDs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.config import Config
from hvdtrain.elastic.status import Identity
from hvdtrain.engine.script_state import ScriptState
from hvdtrain.errors import UserError
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.several import SeveralOptimizers
from hvdtrain.process import start_checks
from hvdtrain.process.prepare import Prepared
from hvdtrain.runtime import device
from hvdtrain.runtime.collectives import AgreedError
from hvdtrain.runtime.device import seed_all
from hvdtrain.runtime.mesh import Topology

ALL = ["a", "b"]
TWO_HOSTS = ("node1", "node1", "node2", "node2")


def _choose(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    visible: list[list[str]],
    built: bool = True,
    wanted: str = "auto",
    hosts: tuple[str, ...] = TWO_HOSTS,
    device_index: int | None = None,
) -> torch.device:
    """Return the device of a rank; `visible`: GPUs that each rank sees."""
    seen = visible[rank]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=seen[gpu])
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(device.hvd, "nccl_built", lambda: built)
    monkeypatch.setattr(device.hvd, "cuda_built", lambda: built)
    gathered = []

    def gather(mine: list[str], name: str) -> list[list[str]]:
        assert mine == (seen if wanted == "auto" else [])
        gathered.append(name)
        return visible

    monkeypatch.setattr(device, "gather_json", gather)
    local_size = hosts.count(hosts[rank])
    topology = Topology(rank, len(hosts), rank % local_size, local_size, hosts)
    try:
        return device.choose_device(topology, wanted, device_index)
    finally:
        assert gathered, "the other ranks wait in the collective"


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
    with pytest.raises(UserError, match="node1 has 1 GPU, but 2 ranks"):
        _choose(monkeypatch, 1, visible)


def test_identical_gpu_uuids_on_different_hosts_are_distinct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Virtual machines of one image can report the same UUIDs: only a host's own ranks count.
    assert _choose(monkeypatch, 3, [["a"], ["b"], ["a"], ["b"]]) == torch.device("cuda", 0)


def test_rank_without_a_gpu_uses_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _choose(monkeypatch, 0, [[], ["b"], ["c"], ["d"]]) == torch.device("cpu")


def test_ranks_on_gpus_require_a_horovod_with_gpu_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visible = [ALL, ALL, ["c", "d"], []]
    with pytest.raises(
        UserError, match=r"node1 has 2 GPUs, .*horovod build --gpu nccl.*device cpu"
    ):
        _choose(monkeypatch, 0, visible, built=False)
    assert _choose(monkeypatch, 3, visible, built=False) == torch.device("cpu")
    assert _choose(monkeypatch, 0, visible, built=False, wanted="cpu") == torch.device("cpu")


def test_single_process_uses_a_gpu_with_any_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _choose(monkeypatch, 0, [ALL], built=False, hosts=("node1",))
    assert chosen == torch.device("cuda", 0)


def test_elastic_process_requires_a_horovod_with_gpu_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="without operations on GPUs"):  # others will join
        _choose(monkeypatch, 0, [ALL], built=False, hosts=("node1",), device_index=0)


def test_elastic_process_uses_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(visible: list[str], index: int) -> torch.device:
        return _choose(monkeypatch, 0, [visible], hosts=("node1",), device_index=index)

    assert choose(ALL, 1) == torch.device("cuda", 1)
    assert choose(["b"], 1) == torch.device("cuda", 0), "it sees no other GPU"
    with pytest.raises(UserError, match="node1 has 2 GPUs, but 3 ranks"):
        choose(ALL, 2)


def test_ranks_with_one_gpu_are_refused_on_all_ranks() -> None:
    hosts = ("node1", "node1", "node2", "node1")
    same, other = (("node1 a", "node1 b", "node2 a", last) for last in ("node1 b", "node1 c"))
    with pytest.raises(AgreedError, match="the GPU of rank 1 on node1: start one rank") as raised:
        start_checks.check_gpus(Topology(0, 4, 0, 4, hosts, same))
    assert raised.value.rank == 3
    start_checks.check_gpus(Topology(0, 4, 0, 4, hosts, other))
    start_checks.check_gpus(Topology(0, 4, 0, 4, hosts, ("",) * 4))  # CPUs


# --- kernels and rounding ---

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def deterministic(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device whose kernels are deterministic as in an exact run."""
    device.use_deterministic_kernels(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [CPU, CUDA], indirect=True, ids=str)
def test_operation_without_a_deterministic_kernel_raises_on_cuda(
    deterministic: torch.device,
) -> None:
    # This operation has none on a CPU either.
    into, at, value = torch.zeros(2), torch.tensor([0]), torch.ones(1)
    if deterministic == CPU:
        with pytest.warns(UserWarning, match="put_ does not have a deterministic"):
            into.put_(at, value)
        return
    with pytest.raises(RuntimeError) as raised:
        into.put_(at, value)
    explained = device.without_kernel(raised.value)
    assert isinstance(explained, UserError) and "put_ has no deterministic kernel" in str(explained)


def test_other_errors_are_not_of_a_missing_kernel() -> None:
    for error in (RuntimeError("CUDA error"), ValueError("x does not have a deterministic")):
        assert device.without_kernel(error) is None


@pytest.mark.parametrize("deterministic", [CPU, CUDA], indirect=True, ids=str)
def test_kernels_with_warnings_are_reproducible_only_on_cpus(
    deterministic: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert device.reproducible(deterministic)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert device.reproducible(CPU) and not device.reproducible(CUDA)
    torch.use_deterministic_algorithms(False)
    assert not device.reproducible(CPU) and not device.reproducible(CUDA)


def _identity(name: str, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> Identity:
    """Identity of a process on a GPU of this name, which is simulated."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    config = Config(optim=OptimConfig(name=optimizer))  # type: ignore[arg-type]
    prepared: Any = SimpleNamespace(
        config=config,
        task=None,
        device=CUDA,
        precision=SimpleNamespace(name="float32"),
        resolved=SimpleNamespace(epoch_samples=9),
        datasets=SimpleNamespace(fingerprint="f"),
        samples=None,
    )
    return Prepared.identity(prepared, "digest")


@pytest.mark.parametrize(
    ("optimizer", "refused"),
    [
        *((name, False) for name in ("adamw", "adam", "sgd", "lion")),
        *((name, True) for name in ("muon", "adafactor", "adamw8bit")),
    ],
)
def test_unlike_gpus_are_refused_with_optimizers_that_depend_on_them(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, refused: bool
) -> None:
    first, same, other = (
        _identity(name, monkeypatch, optimizer)
        for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")
    )
    assert same.differs_from(first, "a") == ""
    why = other.differs_from(first, "a")
    assert bool(why) == refused
    if refused:
        assert "the GPU here is NVIDIA H100 80GB HBM3, but the GPU of a is NVIDIA A100" in why
        assert "Use one model of GPU" in why and "MKL" not in why


@pytest.mark.parametrize(
    ("named", "products"),
    [
        ({"": torch.optim.AdamW}, False),
        ({"": torch.optim.Muon}, True),
        ({"a": torch.optim.Muon, "b": torch.optim.AdamW}, True),
        ({"": "SOAP"}, True),
    ],
)
def test_products_are_compared_if_the_optimizer_of_a_script_may_multiply(
    named: dict[str, Any], products: bool
) -> None:
    if "SOAP" in named.values():
        named = {"": pytest.importorskip("pytorch_optimizer").SOAP}
    optimizers = {n: kind([nn.Parameter(torch.ones(4, 4))], lr=0.1) for n, kind in named.items()}
    own = SeveralOptimizers(optimizers) if len(optimizers) > 1 else optimizers[""]
    prepared: Any = SimpleNamespace(
        config=Config(),
        task=SimpleNamespace(script_state=ScriptState(own)),
        device=CPU,
        precision=SimpleNamespace(name="float32"),
        resolved=SimpleNamespace(epoch_samples=9),
        datasets=SimpleNamespace(fingerprint="f"),
        samples=None,
    )
    expected = device.rounding(CPU, products=products, by_gpu=products)
    assert Prepared.identity(prepared, "digest").rounding == expected


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
