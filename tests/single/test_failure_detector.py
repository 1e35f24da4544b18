"""How long silence is taken for a delay: the arithmetic, without a clock."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.elastic.failure_detector import Arrivals

LEAST, MOST = 1.0, 3.0
DELAYS = st.lists(st.floats(0.01, 1.2), min_size=8, max_size=600)


def _after(delays: list[float]) -> tuple[Arrivals, float]:
    """A process whose beats came after these delays, and the time of the last one."""
    now = 100.0
    arrivals = Arrivals(now)
    for delay in delays:
        now += delay
        arrivals.heard(now)
    return arrivals, now


@given(DELAYS, st.floats(0.0, 2.0))
def test_a_delay_like_those_before_it_is_an_alarm(delays: list[float], times: float) -> None:
    arrivals, now = _after(delays)
    bound, later = arrivals.bound(LEAST, MOST), now + times * max(delays[-512:])
    assert bound is not None and arrivals.silence(later) <= bound + 1e-6


@given(DELAYS)
def test_a_silence_has_no_end_or_a_short_one_is_an_alarm(delays: list[float]) -> None:
    bound = _after(delays)[0].bound(LEAST, MOST)
    assert bound is not None and LEAST <= bound <= MOST


def test_the_bound_does_not_follow_the_delays() -> None:
    steady = _after([0.25] * 50)[0].bound(LEAST, MOST)
    jittered = _after([0.05, 0.45] * 25)[0].bound(LEAST, MOST)
    slow = _after([0.1, 0.9] * 25)[0].bound(LEAST, MOST)
    one_late = _after([*[0.25] * 50, 0.9, *[0.25] * 50])[0].bound(LEAST, MOST)
    long_ago = _after([0.9, *[0.25] * 600])[0].bound(LEAST, MOST)
    assert steady == long_ago == LEAST
    assert jittered is not None and 1.3 < jittered < 1.5
    assert slow is not None and 2 < slow < MOST
    assert one_late is not None and abs(one_late - 1.8) < 1e-6


def test_a_verdict_is_given_on_too_few_beats() -> None:
    for beats in range(8):
        assert _after([0.25] * beats)[0].bound(LEAST, MOST) is None
    assert _after([0.25] * 8)[0].bound(LEAST, MOST) == LEAST


@given(DELAYS)
def test_phi_falls_while_the_silence_goes_on(delays: list[float]) -> None:
    arrivals, now = _after(delays)
    phis = [arrivals.phi(now + tenths / 10) for tenths in range(50)]
    assert all(later >= earlier for earlier, later in pairwise(phis))
    assert phis[0] < 1 and phis[-1] > 8


def test_time_in_which_nobody_listened_counts_as_silence() -> None:
    arrivals, now = _after([0.25] * 20)
    arrivals.forgive(60)
    assert arrivals.silence(now + 60.25) == 0.25
