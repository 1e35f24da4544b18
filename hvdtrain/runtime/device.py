"""Choice of a rank's device, and its rounding."""

from __future__ import annotations

import hashlib

import horovod.torch as hvd
import torch

from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.topology import Topology


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
    neighbours = topology.ranks_by_host()[topology.host]
    # By UUID: under srun each rank numbers its own GPU 0.
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
