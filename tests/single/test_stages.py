"""Assignment of blocks to pipeline stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UserError
from hvdtrain.parallel.schedules import Costs, Layout, divide

COST = st.integers(min_value=0, max_value=50).map(float)


@st.composite
def _models(draw: st.DrawFn) -> tuple[Costs, int]:
    blocks = draw(st.lists(COST, min_size=1, max_size=8))
    stages = draw(st.integers(min_value=1, max_value=len(blocks)))
    return Costs(draw(COST), blocks, draw(COST)), stages


def _of_stages(costs: Costs, spans: list[range]) -> list[float]:
    found = [sum(costs.blocks[block] for block in span) for span in spans]
    found[0] += costs.first
    found[-1] += costs.last
    return found


@given(_models())
def test_each_block_is_on_one_stage_and_no_stage_is_empty(model: tuple[Costs, int]) -> None:
    costs, stages = model
    spans = divide(costs, stages)
    assert len(spans) == stages and all(len(span) >= 1 for span in spans)
    assert [block for span in spans for block in span] == [*range(len(costs.blocks))]


@given(_models())
def test_division_minimizes_the_costliest_stage_and_is_most_even(
    model: tuple[Costs, int],
) -> None:
    costs, stages = model
    blocks = len(costs.blocks)
    every = [
        [range(begin, end) for begin, end in pairwise((0, *cuts, blocks))]
        for cuts in combinations(range(1, blocks), stages - 1)
    ]

    def price(spans: list[range]) -> tuple[float, float]:
        found = _of_stages(costs, spans)
        return max(found), sum(cost * cost for cost in found)

    assert price(divide(costs, stages)) == pytest.approx(min(map(price, every)))


def test_costly_head_moves_blocks_away_from_the_last_stage() -> None:
    assert divide(Costs(0, [1.0] * 8, 3), 2) == [range(5), range(5, 8)]
    assert divide(Costs(1, [1.0] * 6, 100), 3) == [range(2), range(2, 5), range(5, 6)]


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(UserError, match="of 4 stages needs as many blocks, and the model has 3"):
        divide(Costs(1, [1.0] * 3, 1), 4)


@given(st.integers(1, 8), st.integers(1, 4))
def test_each_virtual_stage_is_on_one_rank(ranks: int, virtual: int) -> None:
    layout = Layout(ranks, virtual)
    held = [stage for rank in range(ranks) for stage in layout.of_rank(rank)]
    assert sorted(held) == [*range(layout.stages)]
    assert layout.of_rank(0)[0] == 0 and layout.of_rank(ranks - 1)[-1] == layout.stages - 1


def test_bubble_equals_the_formula() -> None:
    assert Layout(4).bubble(8) == 3 / 11
    assert Layout(4, virtual=2).bubble(8) == 3 / 19
    assert Layout(1).bubble(8) == 0
