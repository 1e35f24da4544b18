"""A rank's device, the kernels that it uses, its rounding, and its random numbers."""

from __future__ import annotations

import hashlib
import os
import random
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hvdtrain.errors import UnsupportedTaskError, UserError
from hvdtrain.runtime import machine
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.horovod import hvd
from hvdtrain.runtime.mesh import Topology
from hvdtrain.text import plural

_WITHOUT_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")


def choose_device(
    topology: Topology, wanted: str = "auto", device_index: int | None = None
) -> torch.device:
    """Return a GPU of this rank's own if torch can use one, else the CPU.

    Every rank calls it. A launcher either shows all GPUs of a host to all of its ranks, which then
    use the GPU of their local rank, or shows each rank only its own (srun --gpus-per-task=1).

    Args:
        wanted: `runtime.device`.
        device_index: in an elastic run, this process's GPU on its host: local ranks change, but
            GPUs do not. The process does not know the other ranks yet; `gpu_of` is compared later.

    Raises:
        UserError: this host has fewer GPUs than ranks, or Horovod cannot exchange between GPUs.
    """
    visible_here = _visible_gpus() if wanted == "auto" else []
    visible = gather_json(visible_here, "gpus")
    if not visible_here:
        return torch.device("cpu")
    exchanges = topology.world_size > 1 or device_index is not None
    if exchanges and not (hvd.nccl_built() or hvd.cuda_built()):
        raise UserError(
            f"{topology.host} has {plural(len(visible_here), 'GPU')}, but Horovod was built "
            "without operations on GPUs: `hvdtrain horovod build --gpu nccl --install` builds it "
            "with them; to train on CPUs add --runtime.device cpu"
        )
    neighbors = topology.ranks_by_host()[topology.host]
    # By UUID: under srun each rank numbers its own GPU 0.
    others = {gpu for rank in neighbors if rank != topology.rank for gpu in visible[rank]}
    own = others.isdisjoint(visible_here)
    if device_index is None:
        index = 0 if own else topology.local_rank
    else:
        index = 0 if len(visible_here) == 1 else device_index
    if index >= len(visible_here):
        gpus = plural(len(others.union(visible_here)), "GPU")
        ranks = max(topology.local_size, index + 1)
        raise UserError(
            f"{topology.host} has {gpus}, but {ranks} ranks; start one rank for each GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def gpu_of(device: torch.device) -> str:
    """Return the host and the UUID of a GPU, which identify it among all ranks; "": a CPU.

    By NCCL's name of the host, if it is set: NCCL, too, refuses two ranks with one GPU of one host.
    """
    if device.type != "cuda":
        return ""
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host} {torch.cuda.get_device_properties(device).uuid}"


def rounding(device: torch.device, products: bool, by_gpu: bool) -> str:
    """Return what an optimizer step's results on this device depend on; "": on nothing.

    Each rank computes norms and the optimizer step itself. torch and MKL choose kernels by
    processor, and results differ between AVX2 and AVX512 (a square root), or without FMA. Ranks
    with different results would drift apart from the first step on.

    Args:
        products: the optimizer multiplies matrices, as Muon does.
        by_gpu: the optimizer's kernels on a GPU depend on the GPU's model.

    Returns:
        On a CPU a digest of such results, on a GPU its name.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device) if by_gpu else ""
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
    deterministic = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        return deterministic and not torch.is_deterministic_algorithms_warn_only_enabled()
    return deterministic or torch.get_num_threads() == 1


def _visible_gpus() -> list[str]:
    """UUIDs of the GPUs that this rank can use, in CUDA's order."""
    if not torch.cuda.is_available():
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


def use_deterministic_kernels(device: torch.device) -> None:
    """Use deterministic kernels; call it before the first computation on the device.

    If an operation has none, it prints a warning on a CPU and raises an error on CUDA, see
    `without_kernel`: with warnings alone, torch does not promise a deterministic backward pass of
    attention on CUDA.

    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cuda")
    torch.backends.cudnn.benchmark = False
    # Only code that reads uninitialized memory would notice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def without_kernel(error: BaseException) -> UserError | None:
    """Return the error for the user if an operation has no deterministic kernel, else None."""
    found = _WITHOUT_KERNEL.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    return UnsupportedTaskError(
        f"{found[1]} has no deterministic kernel on this device, as exchange.name exact "
        "(torch.use_deterministic_algorithms) requires: use another operation in the model or its "
        "loss, or exchange.name dense"
    )


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


def random_state() -> tuple[Any, ...]:
    """States of the generators that `seed_all` seeds; equal ones give the same numbers."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    of_torch = [state.numpy().tobytes() for state in (torch.get_rng_state(), *devices)]
    of_numpy: Any = np.random.get_state()
    _, words, *place = of_numpy
    return of_torch, words.tobytes(), place, random.getstate()


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the generators that `seed_all` seeds to their states before the context."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)
