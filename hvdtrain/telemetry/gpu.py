"""GPUs: peak FLOP/s from the manufacturers' data sheets, and metrics from NVML."""

from __future__ import annotations

import math
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


# Part of torch.cuda.get_device_name() -> peak; the first match is used.
PEAKS = {
    "B200": Peak(75e12, 1.1e15, 2.25e15),
    "H200": Peak(67e12, 494.7e12, 989.4e12),
    "GH200": Peak(67e12, 494.7e12, 989.4e12),
    "H100 PCIe": Peak(51e12, 378e12, 756e12),
    "H100 NVL": Peak(60e12, 417.5e12, 835e12),
    "H100": Peak(67e12, 494.7e12, 989.4e12),
    "A100": Peak(19.5e12, 156e12, 312e12),
    "A40": Peak(37.4e12, 74.8e12, 149.7e12),
    "A30": Peak(10.3e12, 82e12, 165e12),
    "A10G": Peak(31.5e12, 35e12, 70e12),
    "L40S": Peak(91.6e12, 183e12, 362e12),
    "L4": Peak(30.3e12, 60e12, 121e12),
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
    found = next((peak for name, peak in PEAKS.items() if name in device_name), None)
    if found is None:
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return found.half
    if dtype == torch.float32:
        return found.tf32 if tf32 else found.float32
    return None


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
