"""The few collectives beside the exchange of gradients. Every rank calls each, or none does."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import horovod.torch as hvd
import torch
from torch import Tensor

from hvdtrain.errors import UserError
from hvdtrain.runtime import heartbeat

P = ParamSpec("P")
R = TypeVar("R")


def _waits(collective: Callable[P, R]) -> Callable[P, R]:
    """This rank's watchdog is told that it waits for the others."""

    @wraps(collective)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> R:
        with heartbeat.OWN.waiting():
            return collective(*args, **kwargs)

    return waiting


@_waits
def broadcast_json(value: Any, name: str, root: int = 0) -> Any:
    """The `value` of rank `root`, which JSON must be able to hold, on every rank."""
    if hvd.size() == 1:
        return value
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = hvd.broadcast(torch.tensor([data.numel()]), root, name=f"{name}.size")
    if hvd.rank() != root:
        data = torch.empty(int(size), dtype=torch.uint8)
    data = hvd.broadcast(data, root, name=name)
    return json.loads(data.numpy().tobytes())


@_waits
def gather_json(value: Any, name: str) -> list[Any]:
    """Every rank's `value`, in the order of the ranks, on every rank."""
    if hvd.size() == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = hvd.allgather(torch.tensor([data.numel()]), name=f"{name}.size").tolist()
    parts = hvd.allgather(data, name=name).split(sizes)
    return [json.loads(part.numpy().tobytes()) for part in parts]


@_waits
def gather_bytes(value: bytes, name: str) -> list[bytes]:
    """Every rank's `value`, of the same length on all, in one exchange."""
    if hvd.size() == 1:
        return [value]
    row = torch.frombuffer(bytearray(value), dtype=torch.uint8).unsqueeze(0)
    return [bytes(theirs.tolist()) for theirs in hvd.allgather(row, name=name)]


@_waits
def broadcast_tensors(tensors: dict[str, Tensor], name: str, root: int = 0) -> None:
    """Overwrites the tensors, the same names and shapes on every rank, with rank `root`'s."""
    if hvd.size() == 1:
        return
    sent = []
    for key, tensor in sorted(tensors.items()):
        # As bytes: Horovod knows fewer dtypes than torch, bfloat16 is not among them.
        data = tensor.contiguous().view(-1).view(torch.uint8)
        sent.append((tensor, data, hvd.broadcast_async_(data, root, name=f"{name}.{key}")))
    for tensor, data, handle in sent:
        hvd.synchronize(handle)
        if data.data_ptr() != tensor.data_ptr():  # it was not contiguous
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


@_waits
def sum_(values: Tensor, name: str) -> Tensor:
    """The sum over the ranks."""
    return values if hvd.size() == 1 else hvd.allreduce(values, op=hvd.Sum, name=name)


@_waits
def completed(handle: int) -> Tensor:
    """The result of a collective that was begun earlier; `handle` is Horovod's."""
    return hvd.synchronize(handle)


class AgreedError(UserError):
    """An error of at least one rank, known to all: they end alike, and one of them says why."""

    def __init__(self, message: str, exit_code: int, rank: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.rank = rank


def agree(error: UserError | None, name: str) -> None:
    """Ends a part of the work that may fail on some ranks and not on others.

    Raises:
        AgreedError: on every rank, if any rank brings an error; the lowest one's counts.
    """
    failures = sum_(torch.tensor(float(error is not None)), f"{name}.failures")
    if not failures:
        return  # as nearly always; with many ranks each exchange less is time saved
    mine = None if error is None else [str(error), error.exit_code]
    for rank, theirs in enumerate(gather_json(mine, name)):
        if theirs is not None:
            raise AgreedError(theirs[0], theirs[1], rank)
