"""Learning rates as a function of the step."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.optim.config import ScheduleConfig
from hvdtrain.optim.optimizer import learning_rate

NAMES = ["cosine", "linear", "constant"]


@given(
    name=st.sampled_from(NAMES),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 200),
    ratio=st.floats(0, 1),
    peak=st.floats(1e-6, 10),
)
def test_rate_stays_below_peak_and_never_rises_after_warmup(
    name: str, warmup: int, steps: int, ratio: float, peak: float
) -> None:
    config = ScheduleConfig(name=name, warmup_steps=warmup, final_ratio=ratio)  # type: ignore[arg-type]
    rates = [learning_rate(config, peak, step, steps) for step in range(steps)]
    slack = peak * 1e-9
    assert all(0 <= rate <= peak + slack for rate in rates)
    assert all(a < b for a, b in pairwise(rates[:warmup]))
    after = rates[warmup:]
    assert all(a >= b - slack for a, b in pairwise(after))


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_decaying_schedule_meets_its_peak_midpoint_and_end(name: str) -> None:
    config = ScheduleConfig(name=name, warmup_steps=10, final_ratio=0.1)  # type: ignore[arg-type]
    assert learning_rate(config, 2.0, 0, 111) == pytest.approx(0.2)
    assert learning_rate(config, 2.0, 9, 111) == 2.0
    assert learning_rate(config, 2.0, 10, 111) == 2.0
    assert learning_rate(config, 2.0, 60, 111) == pytest.approx(1.1)
    assert learning_rate(config, 2.0, 110, 111) == pytest.approx(0.2)


def test_cosine_schedule_follows_a_cosine() -> None:
    config = ScheduleConfig(name="cosine", warmup_steps=0, final_ratio=0.0)
    for step in range(101):
        expected = (1 + math.cos(math.pi * step / 100)) / 2
        assert learning_rate(config, 1.0, step, 101) == pytest.approx(expected)


def test_constant_schedule_stays_at_peak_after_warmup() -> None:
    config = ScheduleConfig(name="constant", warmup_steps=3)
    rates = [learning_rate(config, 0.3, step, 50) for step in range(50)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3]) and set(rates[3:]) == {0.3}
