"""Exact totals: independent of the order and grouping of additions."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.engine.accumulate import Totals

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def _totals(exact: bool = True) -> Totals:
    return Totals(torch.zeros(Totals.number_of_parts(exact), 1, dtype=torch.float64))


@given(numbers=NUMBERS, ranks=st.integers(1, 5), data=st.data())
def test_total_is_exact_for_any_order_and_number_of_ranks(
    numbers: list[float], ranks: int, data: st.DataObject
) -> None:
    alone = _totals()
    for number in numbers:
        alone.add(torch.tensor([[number]], dtype=torch.float64))
    shuffled = data.draw(st.permutations(numbers))
    each = [_totals() for _ in range(ranks)]
    for place, number in enumerate(shuffled):
        each[place % ranks].add(torch.tensor([[number]], dtype=torch.float64))
    together = Totals(sum((t.parts for t in each[1:]), each[0].parts))
    assert together.value().item() == alone.value().item()
    expected = math.fsum(numbers)
    assert abs(alone.value().item() - expected) <= 2e-13 * len(numbers) + 1e-15 * abs(expected)


def test_nonfinite_numbers_make_the_total_nonfinite() -> None:
    for exact in (False, True):
        for number in (math.inf, -math.inf):
            totals = _totals(exact)
            totals.add(torch.tensor([[number]]))
            assert totals.value().item() == number
        totals.add(torch.tensor([[math.nan]]))
        assert math.isnan(totals.value().item())
