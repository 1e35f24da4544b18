"""Choice of torch's and MKL's kernels: bitwise reproducible or faster ones."""

from __future__ import annotations

import os

import torch


def choose_kernels() -> None:
    """Make MKL choose the kernels of its vector functions before torch uses several threads.

    MKL chooses at the first call. If two threads make it at once, one of them may compute with
    errors of 1e-4. With 2 threads the first square roots, in the optimizer's first step, were
    wrong in 1 of 30 processes (torch 2.13), and that rank's parameters drifted from the others'.
    """
    torch.ones(1).sqrt()


def use_deterministic_kernels() -> None:
    """Use deterministic kernels, with a warning if there is none; call it before CUDA is used.

    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    # Only code that reads uninitialized memory would notice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_cuda_kernels(tf32: bool, cudnn_benchmark: bool) -> None:
    """Set whether float32 products may be rounded to TF32, and whether cuDNN tries its algorithms.

    https://docs.pytorch.org/docs/stable/notes/cuda.html
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = cudnn_benchmark
