"""Configuration of the numbers that a model is computed with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class PrecisionConfig:
    """The numbers that a model is computed with.

    Args:
        name: `float32` computes in the dtype of the parameters; `bf16` and `fp16` do matrix
            products in 16 bits (autocast), `fp16` with a dynamic loss scale; `bf16-params` keeps
            parameters in bfloat16, master weights and optimizer state in float32; `auto` is bf16
            where the GPU has it, fp16 on older ones and float32 on CPUs
        tf32: float32 matrix products and convolutions of CUDA round their factors to TF32
        cudnn_benchmark: cuDNN tries its algorithms for each new shape and takes the fastest
    """

    name: Literal["float32", "bf16", "fp16", "bf16-params", "auto"] = "float32"
    tf32: bool = False
    cudnn_benchmark: bool = False
