"""Threads of a rank, and the cores and memory that its container allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.runtime import init, machine
from hvdtrain.runtime.machine import cores, free_memory

PROCESSORS = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    monkeypatch.setattr(init, "_own_threads", before)
    yield
    torch.set_num_threads(before)


def _initialize(monkeypatch: pytest.MonkeyPatch, ranks: int) -> int:
    """Initialize a generation with `ranks` ranks on this host, with simulated answers: only one
    process asks, and the tests' machine may have two cores."""

    def gather(value: Any, name: str) -> list[Any]:
        return [value] * ranks

    monkeypatch.setattr(init, "gather_json", gather)
    init.initialize()
    return torch.get_num_threads()


def test_thread_count_follows_the_ranks_of_each_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 32)
    found = [_initialize(monkeypatch, ranks) for ranks in (2, 2, 2, 4, 2, 1, 64)]
    assert found == [16, 16, 16, 8, 16, 32, 1]


def test_thread_count_set_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    assert _initialize(monkeypatch, 2) == 3


def test_thread_count_set_by_the_script_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 32)
    monkeypatch.setattr(init, "_own_threads", None)
    torch.set_num_threads(init._default_threads() + 1)
    assert _initialize(monkeypatch, 2) == init._default_threads() + 1
    torch.set_num_threads(init._default_threads())
    assert _initialize(monkeypatch, 2) == 16


@pytest.mark.parametrize("value", ["", "auto"])
def test_thread_count_that_openmp_ignores_is_not_set_by_the_user(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 32)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert _initialize(monkeypatch, 2) == 16


def _write(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_cores_are_counted_once_and_only_within_the_affinity(tmp_path: Path) -> None:
    assert cores(tmp_path) == len(PROCESSORS)
    for processor in PROCESSORS:
        directory = tmp_path / f"sys/devices/system/cpu/cpu{processor}/topology"
        _write(directory, thread_siblings_list="0-999\n")
    assert cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("0::/job/step", {"sys__fs__cgroup__job__cpu.max": "150000 100000\n"}),
        ("0::/", {"sys__fs__cgroup__cpu.max": "50000 100000"}),
        (
            "3:cpu,cpuacct:/job\n4:memory:/job",
            {
                "sys__fs__cgroup__cpu,cpuacct__job__cpu.cfs_quota_us": "100000",
                "sys__fs__cgroup__cpu,cpuacct__job__cpu.cfs_period_us": "100000",
            },
        ),
    ],
)
def test_cpu_quota_of_a_container_limits_the_cores(
    tmp_path: Path, group: str, files: dict[str, str]
) -> None:
    assert cores(_write(tmp_path, proc__self__cgroup=group, **files)) == 1


@pytest.mark.parametrize("group", ["0::/job", "3:cpu:/job"])
def test_cgroup_without_a_quota_keeps_all_cores(tmp_path: Path, group: str) -> None:
    files = {
        "sys__fs__cgroup__job__cpu.max": "max 100000\n",
        "sys__fs__cgroup__cpu__job__cpu.cfs_quota_us": "-1",
        "sys__fs__cgroup__cpu__job__cpu.cfs_period_us": "100000",
    }
    assert cores(_write(tmp_path, proc__self__cgroup=group, **files)) == len(PROCESSORS)


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("0::/job/step", ("job__memory.max", "job__memory.current", "job__memory.stat")),
        (
            "4:memory:/job",
            ("memory__job__memory.limit_in_bytes", "memory__job__memory.usage_in_bytes",
             "memory__job__memory.stat"),
        ),
    ],
)  # fmt: skip
def test_memory_limit_of_a_container_limits_free_memory(
    tmp_path: Path, group: str, names: tuple[str, ...]
) -> None:
    stat = "anon 5\ninactive_file 1000\ntotal_inactive_file 1000\n"
    values = dict(zip(names, ("5000\n", "4500\n", stat), strict=True))
    files = {f"sys__fs__cgroup__{name}": value for name, value in values.items()}
    assert free_memory(_write(tmp_path, proc__self__cgroup=group, **files)) == 1500


def test_cgroup_without_a_limit_keeps_the_memory_of_the_host(tmp_path: Path) -> None:
    files = {"sys__fs__cgroup__job__memory.max": "max\n"}
    assert free_memory(_write(tmp_path, proc__self__cgroup="0::/job", **files)) > 1 << 20
