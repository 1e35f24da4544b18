"""How many ranks this host takes by default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hvdtrain.runtime.machine import cores

_NVIDIA = "proc/driver/nvidia/gpus"
_AMD = "sys/class/kfd/kfd/topology/nodes"


def gpus(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Return the number of GPUs that a process with this environment may use.

    Args:
        root: directory that contains /proc and /sys.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in env:
            return len([one for one in env[name].split(",") if one.strip() not in ("", "-1")])
    nvidia = len(list((root / _NVIDIA).glob("*")))
    return nvidia or sum(_is_gpu(node) for node in (root / _AMD).glob("*"))


def _is_gpu(node: Path) -> bool:
    with suppress(OSError):
        return any(
            line.startswith("simd_count ") and line.split()[1] != "0"
            for line in (node / "properties").read_text().splitlines()
        )
    return False


def default_slots(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks: one per GPU; without GPUs, one per core of the Slurm job."""
    if found := gpus(env):
        return found
    allocated = env.get("SLURM_CPUS_ON_NODE", "")
    return min(cores(), int(allocated)) if allocated.isdecimal() and int(allocated) else cores()
