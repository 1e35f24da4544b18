"""Which device a rank computes on."""

from __future__ import annotations

import hashlib

import horovod.torch as hvd
import torch

from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.topology import Topology


def choose_device(topology: Topology, device_index: int | None = None) -> torch.device:
    """A GPU of this rank's own where torch has CUDA and Horovod was built for it, else the CPU.

    Every rank calls it. Launchers either show a host's ranks all of its GPUs, and rank and GPU
    pair up by number, or show each rank only its own (srun --gpus-per-task=1).

    Args:
        device_index: this process's GPU on its host, where that is not its local rank: in an
            elastic run local ranks change, and GPUs do not.

    Raises:
        UserError: this host has fewer GPUs than ranks.
    """
    visible_here = _visible_gpus()
    visible = gather_json(visible_here, "gpus")
    if not visible_here:
        return torch.device("cpu")
    neighbours = topology.ranks_by_host()[topology.host]
    # By UUID: under srun each rank calls its own GPU number 0.
    others = {gpu for rank in neighbours if rank != topology.rank for gpu in visible[rank]}
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
    """A digest of what an optimizer's step computes, as this processor rounds it; "": a GPU.

    Each rank computes norms and the optimizer's step for itself. torch and MKL choose kernels by
    processor, and round these otherwise with AVX2 than with AVX512 (a square root), or without
    FMA: ranks with unlike digests would drift apart from the first step on.

    Args:
        products: the optimizer multiplies matrices, as Muon does.
    """
    if device.type != "cpu":
        return ""
    # Whatever kernels there are: exact up to the product, which IEEE rounds.
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


def _visible_gpus() -> list[str]:
    """UUIDs of the GPUs that this rank can use, in CUDA's order."""
    if not torch.cuda.is_available():
        return []
    if not (hvd.nccl_built() or hvd.cuda_built()):
        logger.warning(
            "CUDA is there, but Horovod was built without it: training on the CPU; "
            "`hvdtrain horovod build --gpu nccl --install` builds it for GPUs"
        )
        return []
    gpus = range(torch.cuda.device_count())
    return [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in gpus]
