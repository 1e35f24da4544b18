"""The failure detector's bound on silence, with a simulated clock."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.elastic.failure_detector import (
    BEAT_SECONDS,
    THIS_HOST,
    FailureDetector,
    TrackedProcess,
)

LEAST, MOST = 1.0, 3.0
DELAYS = st.lists(st.floats(0.01, 1.2), min_size=8, max_size=600)


def _after(delays: list[float]) -> tuple[TrackedProcess, float]:
    """Return a process whose heartbeats had these delays, and the time of the last one."""
    now = 100.0
    arrivals = TrackedProcess("a", now)
    for delay in delays:
        now += delay
        arrivals.record(now)
    return arrivals, now


@given(DELAYS, st.floats(0.0, 2.0))
def test_delay_up_to_twice_the_longest_seen_is_no_alarm(delays: list[float], times: float) -> None:
    arrivals, now = _after(delays)
    bound, later = arrivals.bound(LEAST, MOST), now + times * max(delays[-512:])
    assert bound is not None and arrivals.silence(later) <= bound + 1e-6


@given(DELAYS)
def test_silence_bound_stays_within_its_limits(delays: list[float]) -> None:
    bound = _after(delays)[0].bound(LEAST, MOST)
    assert bound is not None and LEAST <= bound <= MOST


def test_bound_adapts_to_observed_delays() -> None:
    steady = _after([0.25] * 50)[0].bound(LEAST, MOST)
    jittered = _after([0.05, 0.45] * 25)[0].bound(LEAST, MOST)
    slow = _after([0.1, 0.9] * 25)[0].bound(LEAST, MOST)
    one_late = _after([*[0.25] * 50, 0.9, *[0.25] * 50])[0].bound(LEAST, MOST)
    long_ago = _after([0.9, *[0.25] * 600])[0].bound(LEAST, MOST)
    assert steady == long_ago == LEAST
    assert jittered is not None and 1.3 < jittered < 1.5
    assert slow is not None and 2 < slow < MOST
    assert one_late is not None and abs(one_late - 1.8) < 1e-6


def test_no_verdict_is_given_on_too_few_heartbeats() -> None:
    for beats in range(8):
        assert _after([0.25] * beats)[0].bound(LEAST, MOST) is None
    assert _after([0.25] * 8)[0].bound(LEAST, MOST) == LEAST


@given(DELAYS)
def test_phi_increases_during_silence(delays: list[float]) -> None:
    arrivals, now = _after(delays)
    phis = [arrivals.phi(now + tenths / 10) for tenths in range(50)]
    assert all(later >= earlier for earlier, later in pairwise(phis))
    assert phis[0] < 1 and phis[-1] > 8


def test_time_without_listening_does_not_count_as_silence() -> None:
    arrivals, now = _after([0.25] * 20)
    arrivals.excuse(60)
    assert arrivals.silence(now + 60.25) == 0.25


class Network:
    """Ranks that send heartbeats with jitter to a detector, over links that can fail.

    Args:
        hosts: the host of each rank.
        late: delays of heartbeats in seconds, one after the other.
    """

    def __init__(self, hosts: list[str], late: list[float]) -> None:
        self.detector = FailureDetector(MOST)
        self.detector.begin(range(len(hosts)), MOST)
        self.now = 1000.0
        self.silent: dict[int, float] = {}  # rank -> time at which it was declared lost
        self.deaf = self.unheard = 0
        self._hosts = hosts
        self._due = [self.now + late[rank % len(late)] for rank in range(len(hosts))]
        self._late = late
        self._beats = 0

    def run(self, seconds: float, cut: frozenset[str] = frozenset()) -> None:
        """Let time pass; heartbeats of the hosts in `cut` are lost."""
        end = self.now + seconds
        while self.now < end:
            for rank, host in enumerate(self._hosts):
                if self._due[rank] <= self.now:
                    self._beats += 1
                    self._due[rank] += (
                        BEAT_SECONDS - 0.075 + self._late[self._beats % len(self._late)]
                    )
                    if host not in cut:
                        self.detector.beat(rank, host, self.now)
            verdicts = self.detector.look(self.now)
            self.deaf += verdicts.common_silence > 0
            self.unheard += len(verdicts.lost_datagrams)
            for silence in verdicts.silent:
                self.silent.setdefault(silence.number, self.now)
                self.detector.give_up(silence.number)
            self.now += 0.05


OTHERS = ["a", "b", "c"]
ON_OTHER_HOSTS = st.lists(st.sampled_from(OTHERS), min_size=1, max_size=6)
LATE = st.lists(st.floats(0, 0.15), min_size=5, max_size=9)
OUTAGES = st.floats(0.1, 8)
SEVERAL = ON_OTHER_HOSTS.filter(lambda hosts: len(set(hosts)) > 1)


@given(ON_OTHER_HOSTS, OUTAGES, LATE)
def test_no_rank_is_given_up_when_the_launcher_without_ranks_is_cut_off(
    hosts: list[str], seconds: float, late: list[float]
) -> None:
    network = Network(hosts, late)
    network.run(5)
    network.run(seconds, cut=frozenset(hosts))
    network.run(5)
    assert not network.silent
    assert network.deaf or seconds < 3.5


@given(SEVERAL, st.integers(1, 2), OUTAGES, LATE)
def test_no_rank_is_given_up_when_all_other_hosts_fall_silent_at_once(
    hosts: list[str], own: int, seconds: float, late: list[float]
) -> None:
    network = Network([*hosts, *[THIS_HOST] * own], late)
    network.run(5)
    network.run(seconds, cut=frozenset(hosts))
    network.run(5)
    assert not network.silent


@given(SEVERAL, st.integers(0, 2), st.sampled_from(OTHERS), LATE)
def test_one_host_of_several_that_falls_silent_is_given_up_in_time(
    hosts: list[str], own: int, dead: str, late: list[float]
) -> None:
    network = Network([*hosts, *[THIS_HOST] * own], late)
    network.run(5)
    cut_at = network.now
    network.run(5, cut=frozenset([dead]))
    assert set(network.silent) == {rank for rank, host in enumerate(hosts) if host == dead}
    assert all(at - cut_at <= 1.7 for at in network.silent.values())


@given(st.integers(1, 3), st.integers(1, 3), LATE)
def test_only_other_host_is_given_up_in_time_when_it_falls_silent(
    others: int, own: int, late: list[float]
) -> None:
    network = Network([*["a"] * others, *[THIS_HOST] * own], late)
    network.run(5)
    cut_at = network.now
    network.run(5, cut=frozenset("a"))
    assert set(network.silent) == set(range(others))
    assert all(at - cut_at <= 1.7 for at in network.silent.values())


def test_wait_without_a_witness_is_bounded() -> None:
    network = Network(OTHERS, [0.0, 0.1])
    network.run(5)
    network.run(65, cut=frozenset(OTHERS))
    assert set(network.silent) == set(range(len(OTHERS)))


def test_newcomer_does_not_count_as_a_witness() -> None:
    detector = FailureDetector(MOST)
    detector.begin([0], MOST)
    for tick in range(200):
        now = 100 + tick * BEAT_SECONDS
        detector.beat(1, "b", now)
        if now < 105:
            detector.beat(0, "a", now)
        assert not detector.look(now).silent, "no rank could continue without rank 0"


def test_common_silence_needs_no_per_rank_statistics() -> None:
    """With a thousand ranks they would take longer than the interval between two checks."""
    detector = FailureDetector(30.0)
    detector.begin(range(3), 30.0)
    for beat in range(20):
        for number in range(3):
            detector.beat(number, f"host{number}", beat * BEAT_SECONDS)
    with patch.object(TrackedProcess, "bound", side_effect=AssertionError):
        verdicts = detector.look(8.0)
    assert verdicts.common_silence > 3 and not verdicts.silent


def test_punctual_heartbeats_need_no_statistics() -> None:
    """With a thousand ranks they would take more than a core: each has 512 delays."""
    detector = FailureDetector(30.0)
    detector.begin(range(3), 30.0)
    for beat in range(20):
        with patch.object(TrackedProcess, "phi", side_effect=AssertionError if beat > 1 else None):
            for number in range(3):
                detector.beat(number, "a", beat * BEAT_SECONDS)
    assert detector.longest == BEAT_SECONDS


def test_rank_whose_heartbeats_are_unacknowledged_is_not_given_up() -> None:
    detector = FailureDetector(MOST)
    detector.begin([0, 1, 2], MOST)
    for beat in range(100):
        now = 100 + beat * BEAT_SECONDS
        detector.beat(0, "a", now)
        if beat < 40:
            detector.beat(1, "b", now, acknowledged=beat < 30)
            detector.beat(2, "c", now, acknowledged=not 20 < beat < 30)
        verdicts = detector.look(now)
        for silence in verdicts.silent:
            detector.give_up(silence.number)
            assert silence.number == 2, "acknowledgements do not reach rank 1"
    assert detector._tracked[2].given_up and not detector._tracked[1].given_up
