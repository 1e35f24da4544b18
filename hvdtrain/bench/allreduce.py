"""Time of an all-reduce of Horovod, compared with MPI and with torch's gloo."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdtrain.bench.allreduce_report import MPI, TORCH_GLOO, AllreduceReport
from hvdtrain.bench.processes import launch, measure, on_threads
from hvdtrain.errors import UserError
from hvdtrain.launch.hostfile import parse_hosts

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_ELEMENT_BYTES = 4


class _Contender(NamedTuple):
    name: str
    launcher: str  # see `launch`
    kind: str  # see allreduce_worker.py


_CONTENDERS = (
    _Contender("Horovod, Gloo", "gloo", "horovod"),
    _Contender("Horovod, MPI", "mpi", "horovod"),
    _Contender("Horovod, Gloo, hierarchical", "gloo", "horovod-hierarchical"),
    _Contender("Horovod, MPI, hierarchical", "mpi", "horovod-hierarchical"),
    _Contender("Horovod, NCCL", "gloo", "horovod-gpu"),
    _Contender(MPI, "mpi", "mpi"),
    _Contender(TORCH_GLOO, "gloo", "torch-gloo"),
)


def parse_sizes(text: str) -> list[int]:
    """Parse `1K,64K,32M` into bytes, each size once, smallest first; K, M, G are powers of 1024.

    Raises:
        UserError: names the size that is wrong.
    """
    sizes = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([KMG]?)B?", part.strip().upper())
        size = int(match[1]) * _UNITS[match[2]] if match else 0
        if size < _ELEMENT_BYTES or size % _ELEMENT_BYTES or size > 2 << 30:
            raise UserError(
                f"--sizes: {part.strip() or 'an empty size'} is no size of float32 values: "
                f"multiples of {_ELEMENT_BYTES} bytes up to 2G are expected, such as 64K,1M,32M"
            )
        sizes.add(size)
    return sorted(sizes)


def allreduce(sizes: Sequence[int], rounds: int, np: int, hosts: str | None) -> AllreduceReport:
    """Measure the seconds of an all-reduce of each size, for each contender in turn.

    Args:
        hosts: "name:slots,name:slots" with `np` slots; default: this host.

    Raises:
        UserError: Horovod was built with neither Gloo nor MPI, or a launcher is missing.
        BenchError: ranks failed.
    """
    left_out = missing_contenders()
    several = _equal_and_several(hosts)
    present = [
        one
        for one in _CONTENDERS
        if one.name not in left_out and (several or one.kind != "horovod-hierarchical")
    ]
    if not any(one.kind.startswith("horovod") for one in present):
        raise UserError("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    seconds: dict[str, dict[int, list[float]]] = {
        one.name: {size: [] for size in sizes} for one in present
    }
    for number in range(rounds):
        for one in present[:: -1 if number % 2 else 1]:  # alternate the order
            for size, value in _measure(one, sizes, np, hosts).items():
                seconds[one.name][size].append(value)
    return AllreduceReport(np, hosts or f"localhost:{np}", seconds, left_out)


def _equal_and_several(hosts: str | None) -> bool:
    """Whether there are several hosts with the same number of ranks, more than one each."""
    slots = {host.slots for host in parse_hosts(hosts)} if hosts else {1}
    return len(slots) == 1 and slots != {1} and hosts is not None and "," in hosts


def missing_contenders() -> dict[str, str]:
    """Contenders that cannot be measured on this host: name -> reason."""
    from hvdtrain.runtime.init import built_with

    built = built_with()
    mpirun = "" if shutil.which("mpirun") else "mpirun is not installed"
    mpi4py = "" if importlib.util.find_spec("mpi4py") else "mpi4py is not installed"
    gloo = "" if built["gloo"] else "Horovod was built without Gloo"
    mpi = "" if built["mpi"] else "Horovod was built without MPI"
    why = {
        "Horovod, Gloo": gloo,
        "Horovod, MPI": mpi or mpirun,
        "Horovod, Gloo, hierarchical": gloo,
        "Horovod, MPI, hierarchical": mpi or mpirun,
        "Horovod, NCCL": gloo or _why_no_nccl(built),
        MPI: mpi4py or mpirun,
        TORCH_GLOO: gloo,
    }
    return {name: reason for name, reason in why.items() if reason}


def _why_no_nccl(built: Mapping[str, bool]) -> str:
    import torch

    if not built["nccl"]:
        return "Horovod was built without NCCL"
    return "" if torch.cuda.is_available() else "this host has no GPU"


def _measure(one: _Contender, sizes: Sequence[int], np: int, hosts: str | None) -> dict[int, float]:
    command = [sys.executable, "-m", "hvdtrain.bench.allreduce_worker", one.kind]
    command += map(str, sizes)
    result = measure(launch(one.launcher, np, on_threads(1, command), hosts))
    return {int(size): float(value) for size, value in result["seconds"].items()}
