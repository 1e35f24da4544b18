"""Peak FLOP/s of devices, dense, from the manufacturers' data sheets."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """FLOP/s with tensors of a dtype."""

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
        dtype: of the multiplied tensors.
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
