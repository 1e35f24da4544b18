"""Tensor shards: their offsets, the rank that saves each, and the assembled tensor."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

from hvdtrain.parallel.spanned import extent, position
from hvdtrain.runtime.tensor_shards import ShardPosition, assemble, flat_range, local
from tests.support.split_models import wrong_shards
from tests.support.torch_ranks import on_torch_ranks


def _chunks(tensor: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Return torch.chunk's chunks, and empty ones for the remaining ranks."""
    chunks = list(tensor.chunk(ranks, dim))
    empty = tensor.narrow(dim, 0, 0)
    return chunks + [empty] * (ranks - len(chunks))


@st.composite
def _layouts(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    return shape, mesh, [draw(kinds) for _ in mesh]


@given(layout=_layouts(), order=st.randoms())
@settings(max_examples=80, deadline=None)
def test_shards_match_torch_chunks_and_assemble_to_whole_tensor(layout: Any, order: Any) -> None:
    shape, mesh, placements = layout
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    shards = {}
    for place in itertools.product(*map(range, mesh)):
        part = tensor
        for size, index, placement in zip(mesh, place, placements, strict=True):
            if placement.is_shard():
                part = _chunks(part, size, placement.dim)[index]
        offsets, lengths = extent(shape, mesh, place, placements)
        assert lengths == tuple(part.shape)
        shards[offsets, lengths] = ShardPosition(shape, offsets=offsets), part
    in_any_order = [*shards.values()]
    order.shuffle(in_any_order)
    assert torch.equal(assemble(in_any_order), tensor)


def test_shard_of_plain_tensor_shares_its_memory() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    where, part = position(parameter), local(parameter)
    part.fill_(5.0)
    assert parameter.eq(5).all() and where == ShardPosition((3, 2), offsets=(0, 0))
    assert position(torch.tensor(4.0)).shape == ()


def test_partial_placement_is_rejected() -> None:
    with pytest.raises(ValueError, match="yet to be summed"):
        extent((4,), (2,), (0,), [Partial()])


def test_shards_saved_by_first_holders_assemble_to_whole_tensor() -> None:
    """On a 2 x 2 mesh, with uneven shards, and FSDP2's shards of a split model."""
    assert on_torch_ranks(4, wrong_shards, timeout=240) == [[]] * 4


def _flat(start: int, count: int) -> tuple[ShardPosition, Tensor]:
    return ShardPosition((2, 4), start=start), torch.arange(start, start + count)


def _box(offsets: tuple[int, ...], *lengths: int) -> tuple[ShardPosition, Tensor]:
    return ShardPosition((2, 4), offsets=offsets), torch.zeros(lengths)


def test_flat_range_reads_adjacent_shards_in_any_order() -> None:
    shards = [_flat(5, 3), _flat(0, 0), _flat(0, 2), _flat(2, 3), _flat(2, 0)]
    assert flat_range(shards, 1, 7).tolist() == [1, 2, 3, 4, 5, 6]
    assert assemble(shards).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("shards", "error"),
    [
        ([_flat(0, 6), _flat(4, 2)], "overlap"),
        ([_flat(4, 4), _flat(4, 4)], "overlap"),
        ([_flat(0, 4)], "4 elements of 8"),
        ([_flat(0, 4), _flat(4, 4), _flat(4, 1)], "9 elements of 8"),
        ([_box((0, 0), 2, 2), _box((0, 1), 2, 2)], "overlap"),
        ([_box((1, 0), 1, 4), _box((1, 0), 1, 4)], "overlap"),
        ([_box((0, 0), 1, 4), _box((1, 0), 1, 2), _box((0, 2), 2, 1)], "overlap"),
        ([_box((0, 0), 2, 2)], "4 elements of 8"),
        ([_box((0, 0), 2, 2), _box((0, 3), 2, 2)], "outside"),
        ([_box((0, 0), 2, 2), _box((0,), 4)], "different dimensions"),
        ([_box((0, 0), 1, 4), _flat(4, 4)], "different dimensions"),
    ],
)
def test_missing_or_doubled_elements_are_rejected(
    shards: list[tuple[ShardPosition, Tensor]], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        assemble(shards)
    with pytest.raises(ValueError, match=error):
        flat_range(shards, 0, 8)
