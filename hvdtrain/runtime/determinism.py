"""Which of its kernels torch takes: those that give the same bits each time, or faster ones."""

from __future__ import annotations

import os

import torch


def use_deterministic_kernels() -> None:
    """Before CUDA is used. A kernel that has no deterministic version warns when it is used.

    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    # Only what reads memory that was never written would notice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_cuda_kernels(tf32: bool, cudnn_benchmark: bool) -> None:
    """Whether float32 products may be rounded to TF32, and cuDNN tries its algorithms.

    https://docs.pytorch.org/docs/stable/notes/cuda.html
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = cudnn_benchmark
