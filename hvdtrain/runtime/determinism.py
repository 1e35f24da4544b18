"""Which kernels torch and MKL use: those that give the same bits each time, or faster ones."""

from __future__ import annotations

import os

import torch


def choose_kernels() -> None:
    """Lets MKL choose the kernels of its vector functions, before torch uses several threads.

    MKL chooses at the first call. If two threads make it at once, one of them may compute with
    errors of 1e-4: with 2 threads the first square roots, those of the optimizer's first step, were
    wrong in 1 of 30 processes (torch 2.13), and that rank's parameters drifted from the others'.
    """
    torch.ones(1).sqrt()


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
