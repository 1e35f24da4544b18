"""Checks of a host's GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.doctor.finding import WARNING, Finding


def check_gpus(host: str, facts: Mapping[str, Any], slots: int) -> Iterable[Finding]:
    """Check the driver's report on each GPU, and whether torch can use the GPUs.

    Args:
        facts: facts of the host, see host_facts.py.
        slots: ranks on the host.
    """
    for number, gpu in enumerate(facts["gpus"]):
        yield from _gpu(host, number, gpu)
    loaded = facts["libraries"]
    if loaded.get("warning"):
        yield Finding(
            "gpu",
            host,
            f"torch finds no GPU that it can use: {loaded['warning']}",
            "ranks would train on the processor",
            f"a driver for CUDA {loaded['cuda']} or newer, or the torch of an older CUDA",
        )
    found = loaded.get("gpus", 0)
    working = [gpu for gpu in facts["gpus"] if "failed" not in gpu]
    if working and found and slots > found:
        yield Finding(
            "gpu",
            host,
            f"{slots} ranks for {found} GPUs",
            "two ranks share the memory and the time of one GPU",
            f"--hosts {host}:{found}",
            WARNING,
        )


def _gpu(host: str, number: int, gpu: Mapping[str, str]) -> Iterable[Finding]:
    where = f"{host}, GPU {number}"
    if "failed" in gpu:
        why = "the driver or the GPU is gone; ranks there do not start"
        mend = f"dmesg | grep -i xid   # on {host}; then reboot it"
        yield Finding("gpu", host, f"nvidia-smi: {gpu['failed']}", why, mend)
        return
    errors = gpu.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdigit() and int(errors) > 0:
        yield Finding(
            "gpu",
            where,
            f"{errors} memory errors that could not be corrected",
            "results may be wrong, and kernels fail",
            f"drain {host}; nvidia-smi -i {number} -r, or reboot; if it comes back, replace it",
        )
    slow = [n for n in ("hw_slowdown", "hw_thermal_slowdown") if _active(gpu, n)]
    if slow:
        yield Finding(
            "gpu",
            where,
            f"its clock is held down ({', '.join(slow)})",
            "all ranks wait for the slowest one",
            f"nvidia-smi -i {number} -q -d TEMPERATURE,POWER   # cooling and power of {host}",
            WARNING,
        )
    width, most = gpu.get("pcie.link.width.current", ""), gpu.get("pcie.link.width.max", "")
    if width.isdigit() and most.isdigit() and int(width) < int(most):
        yield Finding(
            "gpu",
            where,
            f"its PCIe link has {width} of {most} lanes",
            "copies to and from it take as many times longer",
            f"reseat the board of {host}; lspci -vv | grep LnkSta",
            WARNING,
        )


def _active(gpu: Mapping[str, str], reason: str) -> bool:
    return gpu.get(f"clocks_throttle_reasons.{reason}") == "Active"
