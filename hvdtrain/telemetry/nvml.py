"""Metrics of a GPU from NVML, through nvidia-ml-py (the extra `gpu`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.log import logger

Read = Callable[[], float]

# Gauge -> help text.
GAUGES = {
    "gpu_utilization": "Share of the time in which the GPU computed; NaN: not known",
    "gpu_power_watts": "Power that the GPU draws; NaN: not known",
    "gpu_clock_hertz": "Clock of the GPU's multiprocessors; NaN: not known",
}


def readings(device: torch.device) -> dict[str, Read]:
    """Functions that read each of `GAUGES`.

    They never raise: the value is NaN if it cannot be read, for example without a GPU.
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
        logger.info("no figures of the GPU itself: pip install 'hvdtrain[gpu]'")
        return None
    # By UUID: NVML numbers all GPUs of the host, CUDA only those visible to this process.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        logger.warning("no figures of the GPU itself: NVML says %s", error)
        return None
