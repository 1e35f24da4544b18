"""Shards of tensors: their position in the whole tensor, and a model's tensors on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.runtime.wrappers import plain_name
from hvdtrain.untrusted import is_of, shown

_MOST_ELEMENTS = 1 << 62


@dataclass(frozen=True)
class ShardPosition:
    """Position of a shard in its whole tensor.

    Args:
        shape: shape of the whole tensor.
        start: index of the first element of a flat shard, which is contiguous in C order.
        offsets: corner of a box instead, by dimension.
    """

    shape: tuple[int, ...]
    start: int | None = None
    offsets: tuple[int, ...] | None = None

    def described(self) -> dict[str, Any]:
        """JSON form: {"shape": [...], "start": N} or {"shape": [...], "offsets": [...]}."""
        if self.offsets is None:
            return {"shape": [*self.shape], "start": self.start or 0}
        return {"shape": [*self.shape], "offsets": [*self.offsets]}

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> ShardPosition:
        """Parse the result of `described`.

        Raises:
            KeyError, ValueError: the argument is not of this form.
        """
        shape = described["shape"]
        numbers = described["offsets"] if "offsets" in described else [described["start"]]
        for values in (shape, numbers):
            if not is_of(values, list[int]) or not all(0 <= n < _MOST_ELEMENTS for n in values):
                raise ValueError(shown(described))
        if "offsets" not in described:
            return cls((*shape,), start=numbers[0])
        if len(numbers) != len(shape):
            raise ValueError(shown(described))
        return cls((*shape,), offsets=(*numbers,))


def flat_range(shards: Iterable[tuple[ShardPosition, Tensor]], start: int, stop: int) -> Tensor:
    """Return elements `start` to `stop` of the whole tensor, in C order.

    Args:
        shards: shards of one tensor, with each element in exactly one shard. Other ranks' shards
            may be memory-mapped files: of flat shards, elements outside of the range are not read.

    Raises:
        ValueError: an element is in no shard, or in two.
    """
    given = [*shards]
    if any(position.offsets is not None for position, _ in given):
        return assemble(given).view(-1)[start:stop]
    parts = []
    for position, tensor in given:
        begin = position.start or 0
        low, high = max(begin, start), min(begin + tensor.numel(), stop)
        if low < high:
            parts.append((low, high, tensor, begin))
    # Before memory is allocated: a file may claim any shape.
    _check_count(sum(high - low for low, high, *_ in parts), stop - start)
    spans = sorted((low, high) for low, high, *_ in parts)
    if any(high > low for (_, high), (low, _) in pairwise(spans)):
        raise ValueError("two of its shards overlap")
    found = torch.empty(stop - start, dtype=given[0][1].dtype)
    for low, high, tensor, begin in parts:
        found[low - start : high - start] = tensor.reshape(-1)[low - begin : high - begin]
    return found


def assemble(shards: Iterable[tuple[ShardPosition, Tensor]]) -> Tensor:
    """Return the whole tensor.

    Args:
        shards: shards of the whole tensor, with each element in exactly one shard.

    Raises:
        ValueError: an element is in no shard, or in two.
    """
    given = [*shards]
    shape = given[0][0].shape
    if any(position.shape != shape for position, _ in given):
        raise ValueError("its shards are of tensors of different shapes")
    if all(position.offsets is None for position, _ in given):
        return flat_range(given, 0, prod(shape)).view(shape)
    for position, tensor in given:
        if position.offsets is None or not len(position.offsets) == tensor.dim() == len(shape):
            raise ValueError("its shards have different dimensions")
        if any(
            o + n > most for o, n, most in zip(position.offsets, tensor.shape, shape, strict=True)
        ):
            raise ValueError("a shard lies outside of the tensor")
    _check_count(sum(tensor.numel() for _, tensor in given), prod(shape))
    if _overlap([box(position, tensor) for position, tensor in given if tensor.numel()]):
        raise ValueError("two of its shards overlap")
    whole = torch.empty(shape, dtype=given[0][1].dtype)
    for position, tensor in given:
        whole[box(position, tensor)] = tensor
    return whole


def box(position: ShardPosition, tensor: Tensor) -> tuple[slice, ...]:
    """Return the index of a box in the whole tensor."""
    assert position.offsets is not None
    return tuple(slice(o, o + n) for o, n in zip(position.offsets, tensor.shape, strict=True))


def _check_count(found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(f"its shards have {found} elements of {wanted}")


def _overlap(boxes: list[tuple[slice, ...]]) -> bool:
    """Whether two of several boxes, of at least one element each, have an element in common."""
    boxes = sorted(boxes, key=lambda box: [along.start for along in box])
    for number, one in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if one[0].stop <= other[0].start:
                break  # as do all that follow
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other, strict=True)):
                return True
    return False


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor: a plain tensor in the same memory, without autograd.

    A DTensor is recognized by its method, because importing DTensor is slow.
    """
    if hasattr(tensor, "to_local"):
        with torch.no_grad():  # otherwise it would be a DTensor operation, which is slow
            tensor = tensor.to_local()
    return tensor.detach()


def flattened(tensor: Tensor) -> Tensor:
    """Return a tensor's elements, (n,) and in C order, in its own memory if it is contiguous.

    A tensor with one element counts as contiguous with any stride, but cannot be viewed as bytes.
    """
    data = tensor.contiguous().view(-1)
    return data if data.stride(0) == 1 else data.as_strided((data.numel(),), (1,))


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor whose bits, shape or dtype differ; empty if there is none."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other or not _same(one[name], other[name]):
            return name
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.device == other.device and one.data_ptr() == other.data_ptr():
        return one.stride() == other.stride()
    bits = [flattened(tensor).view(torch.uint8) for tensor in (one, other.to(one.device))]
    return torch.equal(*bits)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by `plain_name` (not copies).

    A tied parameter has one name.
    """
    saved = model.state_dict()
    tensors = {plain_name(name): p.data for name, p in model.named_parameters()}
    tensors.update({plain_name(name): b for name, b in model.named_buffers() if name in saved})
    return tensors
