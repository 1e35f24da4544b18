"""Configuration of the numeric precision of a model's computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class PrecisionConfig:
    """Numeric precision of the model's computation.

    Args:
        name: `float32` computes in the dtype of the parameters; `bf16` and `fp16` do matrix
            products in 16 bits (autocast), `fp16` with a dynamic loss scale; `bf16-params` keeps
            parameters in bfloat16, master weights and optimizer state in float32; `auto` is bf16 if
            the GPU supports it, fp16 on older GPUs and float32 on CPUs
        tf32: float32 matrix products and convolutions on CUDA round their factors to TF32
        cudnn_benchmark: cuDNN benchmarks its algorithms for each new shape and uses the fastest
    """

    name: Literal["float32", "bf16", "fp16", "bf16-params", "auto"] = "float32"
    tf32: bool = False
    cudnn_benchmark: bool = False
