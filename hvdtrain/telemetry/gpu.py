"""GPUs: peak FLOP/s from the manufacturers' data sheets, and metrics from NVML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hvdtrain.log import logger

Read = Callable[[], float]
# Gauge -> help text.
GAUGES = {
    "gpu_utilization": "Fraction of the time during which the GPU computed; NaN if unknown",
    "gpu_power_watts": "Power draw of the GPU; NaN if unknown",
    "gpu_clock_hertz": "Clock rate of the GPU's multiprocessors; NaN if unknown",
}


class Peak(NamedTuple):
    """Dense FLOP/s with tensors of a dtype."""

    float32: float  # without TF32
    tf32: float
    half: float  # bfloat16 and float16


# Words of torch.cuda.get_device_name() -> peak; the entry with the most words is used.
PEAKS = {
    "GB200": Peak(80e12, 1.25e15, 2.5e15),
    "B300": Peak(75e12, 1.1e15, 2.25e15),
    "B200": Peak(75e12, 1.1e15, 2.25e15),
    "GH200": Peak(67e12, 494.7e12, 989.4e12),
    "H200 NVL": Peak(60e12, 417.5e12, 835e12),
    "H200": Peak(67e12, 494.7e12, 989.4e12),
    "H100 PCIe": Peak(51e12, 378e12, 756e12),
    "H100 NVL": Peak(60e12, 417.5e12, 835e12),
    "H100": Peak(67e12, 494.7e12, 989.4e12),
    "H800 PCIe": Peak(51e12, 378e12, 756e12),
    "H800": Peak(67e12, 494.7e12, 989.4e12),
    "H20": Peak(44e12, 74e12, 148e12),
    "A100": Peak(19.5e12, 156e12, 312e12),
    "A800": Peak(19.5e12, 156e12, 312e12),
    "A40": Peak(37.4e12, 74.8e12, 149.7e12),
    "A30": Peak(10.3e12, 82e12, 165e12),
    "A10": Peak(31.2e12, 62.5e12, 125e12),
    "A10G": Peak(31.5e12, 35e12, 70e12),
    "A2": Peak(4.5e12, 9e12, 18e12),
    "RTX A6000": Peak(38.7e12, 77.4e12, 154.8e12),
    "RTX 6000 Ada": Peak(91.1e12, 182.1e12, 364.2e12),
    "L40S": Peak(91.6e12, 183e12, 362e12),
    "L40": Peak(90.5e12, 90.5e12, 181e12),
    "L20": Peak(59.8e12, 59.8e12, 119.5e12),
    "L4": Peak(30.3e12, 60e12, 121e12),
    "V100S": Peak(16.4e12, 16.4e12, 130e12),
    "V100 PCIe": Peak(14e12, 14e12, 112e12),
    "V100": Peak(15.7e12, 15.7e12, 125e12),  # float16; it has no bfloat16
    "T4": Peak(8.1e12, 8.1e12, 65e12),
}


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of this process's device; None if unknown, as on CPUs."""
    if device.type != "cuda":
        return None
    return peak_flops(
        torch.cuda.get_device_name(device), dtype, tf32=torch.backends.cuda.matmul.allow_tf32
    )


def peak_flops(device_name: str, dtype: torch.dtype, tf32: bool) -> float | None:
    """Peak FLOP/s of a device; None if unknown.

    Args:
        device_name: CUDA's name.
        dtype: dtype of the multiplied tensors.
        tf32: whether float32 is multiplied as TF32.
    """
    words = _words(device_name)
    names = [name for name in PEAKS if _words(name) <= words]
    if not names or "mig" in words:  # an instance of MIG is a part of the GPU that it names
        return None
    found = PEAKS[max(names, key=lambda name: len(_words(name)))]
    if dtype in (torch.bfloat16, torch.float16):
        return found.half
    if dtype == torch.float32:
        return found.tf32 if tf32 else found.float32
    return None


def gain_of_bf16(device: torch.device, dtype: torch.dtype) -> str:
    """Describe how much faster this process's device multiplies bfloat16; "": not at all.

    Args:
        dtype: dtype of the multiplied tensors; "" for others than float32.
    """
    if device.type != "cuda" or dtype != torch.float32:
        return ""
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    now, then = peak_of(device, dtype), peak_of(device, torch.bfloat16)
    return f"about {then / now:.0f} times as fast" if now and then else "several times as fast"


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def readings(device: torch.device) -> dict[str, Read]:
    """Functions that read each of `GAUGES`.

    NVML provides them through nvidia-ml-py (the extra `gpu`). The functions never raise: the value
    is NaN if it cannot be read, for example without a GPU.
    """
    gpu = _open(device) if device.type == "cuda" else None
    if gpu is None:
        return dict.fromkeys(GAUGES, lambda: math.nan)
    nvml, handle = gpu

    def reading(value: Callable[[], float]) -> Read:
        def read() -> float:
            try:
                return float(value())
            except nvml.NVMLError:  # some boards lack the sensor
                return math.nan

        return read

    return {
        "gpu_utilization": reading(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        "gpu_power_watts": reading(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        "gpu_clock_hertz": reading(
            lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6
        ),
    }


def _open(device: torch.device) -> tuple[Any, Any] | None:
    """The module and its handle of this GPU; if there is none, log a line and return None."""
    try:
        import pynvml
    except ModuleNotFoundError:
        logger.info("no NVML metrics of the GPU: pip install 'hvdtrain[gpu]'")
        return None
    # By UUID: NVML numbers all GPUs of the host, CUDA only those visible to this process.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        logger.warning("no NVML metrics of the GPU: %s", error)
        return None
