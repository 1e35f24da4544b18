"""Collectives for users: in a task, also during evaluation, and in a user's own script.

    from hvdtrain import comm

    seen = comm.all_reduce(torch.tensor(len(rows)))     # their sum, on every rank
    if comm.is_main_process():
        print(int(seen))

In a script that horovodrun or mpirun starts, or that is started alone (then there is one rank), the
first call starts Horovod; Horovod ends with the process. In a training run it is already started.
With one rank nothing is sent and nothing is counted.

Every rank calls the same collectives in the same order, from one thread at a time. If a rank does
not call a collective, the others fail after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS (900). Errors that
can be detected before a collective starts raise CollectiveError. In addition, all collectives raise

    CollectiveError    the ranks' shapes, dtypes, operations or roots do not match; on all ranks
    RankLostError      another rank is gone; a training run handles it, so do not catch it

Tensors are dense, on the CPU or a GPU; the result is a new tensor on the same device. Gradients do
not flow through a collective: a tensor that requires a gradient is refused.

`name` distinguishes calls if ranks might reach different ones (the coordinator then reports which
one is missing); it must be the same on all ranks. Names need not be unique.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.comm.process import COLLECTIVES
from hvdtrain.errors import CollectiveError
from hvdtrain.runtime import collectives, init
from hvdtrain.runtime.collectives import RankLostError

__all__ = [
    "CollectiveError", "RankLostError", "all_gather", "all_reduce", "barrier", "broadcast",
    "is_main_process", "local_rank", "local_size", "rank", "reduce_scatter", "size",
]  # fmt: skip

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32, torch.float64)
_REDUCED = (*_FLOATS, torch.int32, torch.int64)
# Dtypes that Horovod supports; others are sent as bytes.
_CARRIED = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


def rank() -> int:
    """This process among all, 0 <= rank < size()."""
    return _place("rank").rank


def size() -> int:
    """The number of ranks; in an elastic run, of this generation."""
    return _place("size").world_size


def local_rank() -> int:
    """This process among the ranks on its host, 0 <= local_rank < local_size()."""
    return _place("local_rank").local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return _place("local_size").local_size


def is_main_process() -> bool:
    """Whether this is rank 0, which prints and writes."""
    return rank() == 0


def all_reduce(tensor: Tensor, op: str = "sum", name: str = "") -> Tensor:
    """Combine the tensors of all ranks, element by element.

    Args:
        tensor: any shape; float32, float64, int32 or int64, or float16 or bfloat16, which are
            combined in float32; the same shape and dtype on all ranks.
        op: "sum", "mean" (not of integers), "min" or "max"; the last two may lose a NaN that only
            some ranks have.

    Returns:
        Tensor of the shape and dtype of `tensor`, identical on all ranks.

    Raises:
        CollectiveError: `op` or the dtype cannot be used.
    """
    call = "all_reduce"
    _check_reduction(call, tensor, op, ("sum", "mean", "min", "max"))
    if op in ("sum", "mean") and tensor.is_floating_point():
        COLLECTIVES.follows_ranks(call)
    if not _several(call):
        return tensor.detach().clone()
    with COLLECTIVES.timed(call) as sizes:
        sizes.append(tensor.nbytes)
        return collectives.reduce(_widened(tensor), op, _named(call, name)).to(tensor.dtype)


def all_gather(tensor: Tensor, name: str = "") -> Tensor:
    """Concatenate the tensors of all ranks along their first dimension, in the order of the ranks.

    Args:
        tensor: (N, ...), any dtype; N may differ between ranks, and be 0; the other dimensions and
            the dtype may not differ. A scalar counts as (1,).

    Returns:
        (sum of all N, ...), identical on all ranks.
    """
    call = "all_gather"
    _check(call, tensor)
    COLLECTIVES.follows_ranks(call)
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    if not _several(call):
        return rows.clone()
    with COLLECTIVES.timed(call) as sizes:
        whole = rows.resolve_conj().contiguous()
        sent = whole if tensor.dtype in _CARRIED else whole.view(torch.uint8)
        gathered = collectives.gather_rows(sent, _named(call, name)).view(tensor.dtype)
        sizes.append(gathered.nbytes)
        return gathered


def broadcast(tensor: Tensor, root: int = 0, name: str = "") -> Tensor:
    """Send the tensor of rank `root` to all ranks.

    Args:
        tensor: any shape and dtype, the same on all ranks; only the root's values count.
        root: 0 <= root < size(), the same on all ranks.

    Returns:
        The root's tensor, on every rank.

    Raises:
        CollectiveError: there is no such rank.
    """
    call = "broadcast"
    _check(call, tensor)
    ranks = _place(call).world_size
    if not isinstance(root, int) or not 0 <= root < ranks:
        raise CollectiveError(
            f"comm.broadcast: root {root!r} is not a rank; there are ranks 0 to {ranks - 1}"
        )
    received = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    if _several(call):
        with COLLECTIVES.timed(call) as sizes:
            sizes.append(tensor.nbytes)
            named = _named(call, name)
            collectives.check_same_shape(received, named)
            collectives.broadcast_tensors({"tensor": received}, named, root)
    return received


def reduce_scatter(tensor: Tensor, op: str = "sum", name: str = "") -> Tensor:
    """Combine the tensors of all ranks, and give each rank its shard of the first dimension.

    Args:
        tensor: (N, ...), N >= 0; dtypes as in `all_reduce`; the same shape and dtype on all ranks.
        op: "sum" or "mean" (not of integers).

    Returns:
        (N // size(), ...); if N is not a multiple of size(), the first N % size() ranks receive one
        more row.

    Raises:
        CollectiveError: `op`, the dtype or a scalar cannot be used.
    """
    call = "reduce_scatter"
    _check_reduction(call, tensor, op, ("sum", "mean"))
    if tensor.dim() == 0:
        raise CollectiveError(
            "comm.reduce_scatter: a scalar has no parts; give a tensor of shape (N, ...)"
        )
    if tensor.is_floating_point():
        COLLECTIVES.follows_ranks(call)
    if not _several(call):
        return tensor.detach().clone()
    with COLLECTIVES.timed(call) as sizes:
        sizes.append(tensor.nbytes)
        part = collectives.reduce_scatter(_widened(tensor), op, _named(call, name))
        return part.to(tensor.dtype)


def barrier(name: str = "") -> None:
    """Return when every rank has called it."""
    if _several("barrier"):
        with COLLECTIVES.timed("barrier"):
            collectives.sum_(torch.zeros(1), _named("barrier", name))


def _place(function: str) -> init.RankPosition:
    COLLECTIVES.start(function)
    return init.own_position()


def _several(call: str) -> bool:
    """Whether there are other ranks; raises CollectiveError if they would not respond."""
    several = _place(call).world_size > 1
    COLLECTIVES.check(call)  # also alone: a mistake shows before the run has several ranks
    return several


def _named(call: str, name: str) -> str:
    # The same name in each call: ranks that joined at different times need not agree on a call
    # count, and Horovod's cache recognizes the tensor.
    return f"comm.{call}.{name}" if name else f"comm.{call}"


def _widened(tensor: Tensor) -> Tensor:
    wide = torch.float32 if tensor.dtype in _HALVES else tensor.dtype
    return tensor.detach().to(wide).contiguous()


def _check(call: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise CollectiveError(
            f"comm.{call}: {type(tensor).__name__} is not a tensor; "
            "torch.as_tensor(value) makes one"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CollectiveError(
            f"comm.{call}: a tensor must be dense and have data; this one is "
            f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise CollectiveError(
            f"comm.{call}: gradients do not flow through a collective; give tensor.detach()"
        )


def _check_reduction(call: str, tensor: Tensor, op: str, ops: tuple[str, ...]) -> None:
    _check(call, tensor)
    if op not in ops:
        raise CollectiveError(f"comm.{call}: op {op!r} is unknown; use one of {', '.join(ops)}")
    if tensor.dtype not in _REDUCED:
        raise CollectiveError(
            f"comm.{call}: {tensor.dtype} cannot be combined; convert it first, to one of "
            f"{', '.join(str(dtype) for dtype in _REDUCED)}"
        )
    if op == "mean" and tensor.dtype not in _FLOATS:
        raise CollectiveError(
            f"comm.{call}: the mean of {tensor.dtype} is not an integer; "
            "give tensor.float(), or sum"
        )
