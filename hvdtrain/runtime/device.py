"""A rank's device, the kernels that it uses, its rounding, and its random numbers."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import torch

from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.runtime import machine
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.horovod import hvd
from hvdtrain.runtime.mesh import Topology


def choose_device(topology: Topology, device_index: int | None = None) -> torch.device:
    """Return a GPU of this rank's own if torch and Horovod support CUDA, else the CPU.

    Every rank calls it. A launcher either shows all GPUs of a host to all of its ranks, which then
    use the GPU of their local rank, or shows each rank only its own (srun --gpus-per-task=1).

    Args:
        device_index: this process's GPU on its host, if that is not its local rank: in an
            elastic run local ranks change, but GPUs do not.

    Raises:
        UserError: this host has fewer GPUs than ranks.
    """
    visible_here = _visible_gpus()
    visible = gather_json(visible_here, "gpus")
    if not visible_here:
        return torch.device("cpu")
    neighbors = topology.ranks_by_host()[topology.host]
    # By UUID: under srun each rank numbers its own GPU 0.
    others = {gpu for rank in neighbors if rank != topology.rank for gpu in visible[rank]}
    own = others.isdisjoint(visible_here)
    index = device_index if device_index is not None else 0 if own else topology.local_rank
    if index >= len(visible_here):
        ranks = max(topology.local_size, index + 1)
        raise UserError(
            f"{topology.host} has {len(others.union(visible_here))} GPUs, but {ranks} "
            "ranks; start one rank for each GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def rounding(device: torch.device, products: bool) -> str:
    """Return a digest of an optimizer step's results as this processor rounds them; "": a GPU.

    Each rank computes norms and the optimizer step itself. torch and MKL choose kernels by
    processor, and results differ between AVX2 and AVX512 (a square root), or without FMA. Ranks
    with different digests would drift apart from the first step on.

    Args:
        products: the optimizer multiplies matrices, as Muon does.
    """
    if device.type != "cpu":
        return ""
    # The inputs are the same with any kernels: exact up to the product, which IEEE rounds.
    x = torch.arange(1, 4097, dtype=torch.float32).mul_(0.7).frac_().add_(0.001)
    y = x.flip(0).contiguous()
    found = [
        x.sqrt(),
        x.lerp(y, 0.1),
        x.addcmul(y, y, value=0.001),
        x.addcdiv(y, x, value=-0.001),
        torch.linalg.vector_norm(x.view(64, 64), dim=1),
        torch.linalg.vector_norm(x),
    ]
    if products:
        found.append(x.view(64, 64) @ y.view(64, 64))
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in found)).hexdigest()[:16]


def arithmetic(device: torch.device) -> str:
    """Describe what determines how a device rounds: its kind, and the libraries' versions.

    Ranks with the same description compute bitwise identical gradients, if their kernels are
    reproducible.
    """
    if device.type == "cuda":
        versions = torch.version.cuda, torch.backends.cudnn.version()
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {versions}"
    kernels = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return f"{machine.processor()}, torch {torch.__version__}, {kernels}, {threads} threads"


def reproducible(device: torch.device) -> bool:
    """Whether repeated kernels are bitwise identical: none adds in the order of its threads.

    https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
    """
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return one_thread or torch.are_deterministic_algorithms_enabled()


def _visible_gpus() -> list[str]:
    """UUIDs of the GPUs that this rank can use, in CUDA's order."""
    if not torch.cuda.is_available():
        return []
    if not (hvd.nccl_built() or hvd.cuda_built()):
        logger.warning(
            "CUDA is available, but Horovod was built without it: training on the CPU; "
            "`hvdtrain horovod build --gpu nccl --install` builds it for GPUs"
        )
        return []
    gpus = range(torch.cuda.device_count())
    return [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in gpus]


# --- kernels ------------------------------------------------------------------


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


def widened(values: torch.Tensor) -> torch.Tensor:
    """Convert 16-bit values to float32, in which they are summed; return others unchanged."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy small values from the CPU to a device, without waiting for the device.

    A copy from pageable memory waits for all that was enqueued before. torch keeps page-locked
    memory until the copy has ended.
    """
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


# --- random numbers -----------------------------------------------------------


def seed_all(*key: int) -> None:
    """Seed torch (including CUDA if initialized), numpy and random from integers >= 0.

    Before each micro-batch is loaded, the key is (seed, step, number of the micro-batch). A dataset
    and dropout therefore draw the same numbers for any number of ranks, on any rank that works on
    the micro-batch, and after a restart, and no generator's state has to be saved. Evaluation uses
    keys of its own, so it is independent of training's random numbers.
    """
    # The seeds of a tuple, in half the time; it only takes numbers of 32 bits.
    entropy = np.array(key, dtype=np.uint32) if max(key) < 1 << 32 else key
    first, second = np.random.SeedSequence(entropy).generate_state(2).tolist()
    seed = first << 31 ^ second
    # Not torch.manual_seed: for a device that is not initialized, it formats the caller's stack
    # for later seeding, which takes ten times as long as everything else here.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(first)
    random.seed(seed)
