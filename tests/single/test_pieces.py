"""Pieces of tensors: where each is, who saves it, and the whole made of them."""

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

from hvdtrain.parallel.pieces import Piece, extent, piece, whole
from tests.support.split_models import wrong_pieces
from tests.support.torch_ranks import on_torch_ranks


def _chunks(tensor: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Of torch.chunk, and empty ones for ranks that get none."""
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
def test_pieces_overlap_or_leave_a_gap_or_are_not_those_of_torch(layout: Any, order: Any) -> None:
    shape, mesh, placements = layout
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    pieces = []
    for place in itertools.product(*map(range, mesh)):
        part = tensor
        for size, index, placement in zip(mesh, place, placements, strict=True):
            if placement.is_shard():
                part = _chunks(part, size, placement.dim)[index]
        offsets, lengths = extent(shape, mesh, place, placements)
        assert lengths == tuple(part.shape)
        pieces.append(Piece(shape, offsets, part))
    order.shuffle(pieces)
    assert torch.equal(whole(pieces), tensor)
    copies = math.prod(s for s, p in zip(mesh, placements, strict=True) if p.is_replicate())
    assert sum(p.tensor.numel() for p in pieces) == copies * tensor.numel()


def test_a_piece_of_a_plain_tensor_is_not_its_memory() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    part = piece(parameter)
    part.tensor.fill_(5.0)
    assert parameter.eq(5).all() and part.shape == (3, 2) and part.offsets == (0, 0)
    assert piece(torch.tensor(4.0)).shape == ()


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "no pieces"),
        ([Piece((4,), (0,), torch.ones(3))], "1 of 4 elements"),
        ([Piece((4,), (0,), torch.ones(4)), Piece((5,), (4,), torch.ones(1))], "not of one"),
        ([Piece((4,), (0,), torch.ones(2)), Piece((4,), (2,), torch.ones(2).int())], "not of one"),
    ],
)
def test_a_whole_is_made_of_pieces_that_do_not_make_one(pieces: list[Piece], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        whole(pieces)


def test_a_sum_that_is_spread_over_ranks_passes_for_a_piece() -> None:
    with pytest.raises(ValueError, match="yet to be summed"):
        extent((4,), (2,), (0,), [Partial()])


def test_a_rank_says_wrongly_what_it_holds_or_a_piece_is_saved_twice_or_never() -> None:
    """Of a 2 x 2 mesh, with uneven parts, and what FSDP2 makes of a split model."""
    assert on_torch_ranks(4, wrong_pieces, timeout=240) == [[]] * 4
