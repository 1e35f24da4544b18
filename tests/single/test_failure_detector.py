"""The failure detector's bound on silence, with a simulated clock."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.agent.failure_detector import FailureDetector, TrackedHost
from hvdtrain.agent.protocol import BEAT_SECONDS

LEAST, MOST = 1.0, 3.0
DELAYS = st.lists(st.floats(0.01, 1.2), min_size=8, max_size=600)
LOOK_SECONDS = 0.05


def _after(delays: list[float]) -> tuple[TrackedHost, float]:
    """Return a host whose heartbeats had these delays, and the time of the last one."""
    now = 100.0
    host = TrackedHost(False, now)
    for delay in delays:
        now += delay
        host.record(now)
    return host, now


@given(DELAYS, st.floats(0.0, 2.0))
def test_delay_up_to_twice_the_longest_seen_is_no_alarm(delays: list[float], times: float) -> None:
    host, now = _after(delays)
    later = now + times * max(delays[-512:])
    assert host.silence(later) <= host.bound(LEAST, MOST) + 1e-6


@given(DELAYS)
def test_silence_bound_stays_within_its_limits(delays: list[float]) -> None:
    assert LEAST <= _after(delays)[0].bound(LEAST, MOST) <= MOST


def test_bound_adapts_to_observed_delays() -> None:
    def bound(delays: list[float]) -> float:
        return _after(delays)[0].bound(LEAST, MOST)

    assert bound([0.25] * 50) == bound([0.9, *[0.25] * 600]) == LEAST
    assert 1.3 < bound([0.05, 0.45] * 25) < 1.5
    assert 2 < bound([0.1, 0.9] * 25) < MOST
    assert abs(bound([*[0.25] * 50, 0.9, *[0.25] * 50]) - 1.8) < 1e-6


def test_bound_is_the_longest_on_too_few_heartbeats() -> None:
    for beats in range(8):
        assert _after([0.25] * beats)[0].bound(LEAST, MOST) == MOST
    assert _after([0.25] * 8)[0].bound(LEAST, MOST) == LEAST


def test_time_without_listening_does_not_count_as_silence() -> None:
    detector = _beating(["a", "b"])
    detector.excuse(60, 1064.0)
    assert not detector.look(1064.1)
    assert detector.silence("a", 1064.0) < 5


def _beating(hosts: list[str], until: float = 1004.0) -> FailureDetector:
    """Return a detector of hosts with ranks that have sent heartbeats since 1000."""
    detector = FailureDetector(MOST)
    detector.witnesses = set(hosts)
    for host in hosts:
        detector.connected(host, local=host == HOME, now=1000.0)
    for beat in range(1, round((until - 1000) / BEAT_SECONDS) + 1):
        for host in hosts:
            detector.heard(host, 1000 + beat * BEAT_SECONDS, heartbeat=True)
    return detector


class Network:
    """Hosts whose agents send heartbeats with jitter to a detector, over links that can fail.

    Args:
        hosts: hosts with ranks; HOME is the detector's own.
        late: delays of heartbeats in seconds, one after the other.

    Attributes:
        confirmed, unconfirmed: host -> time at which its silence was reported.
    """

    def __init__(self, hosts: set[str], late: list[float]) -> None:
        self.detector = FailureDetector(MOST)
        self.detector.witnesses = hosts
        self.now = 1000.0
        self.confirmed: dict[str, float] = {}
        self.unconfirmed: dict[str, float] = {}
        self._due = {}
        for index, host in enumerate(sorted(hosts)):
            self.detector.connected(host, host == HOME, self.now)
            self._due[host] = self.now + late[index % len(late)]
        self._late = late
        self._beats = 0

    def run(self, seconds: float, cut: frozenset[str] = frozenset()) -> None:
        """Let time pass; heartbeats of the hosts in `cut` are lost."""
        end = self.now + seconds
        while self.now < end:
            for host, due in self._due.items():
                if due <= self.now:
                    self._beats += 1
                    late = self._late[self._beats % len(self._late)]
                    self._due[host] += BEAT_SECONDS - 0.075 + late
                    if host not in cut:
                        self.detector.heard(host, self.now, heartbeat=True)
            for silence in self.detector.look(self.now):
                found = self.confirmed if silence.confirmed else self.unconfirmed
                found.setdefault(silence.host, self.now)
                if silence.confirmed:
                    self.detector.give_up(silence.host)
            self.now += LOOK_SECONDS


HOME = "home"
OTHERS = ["a", "b", "c"]
ON_OTHER_HOSTS = st.sets(st.sampled_from(OTHERS), min_size=1)
LATE = st.lists(st.floats(0, 0.15), min_size=5, max_size=9)
OUTAGES = st.floats(0.1, 8)
SEVERAL = st.sets(st.sampled_from(OTHERS), min_size=2)


@given(ON_OTHER_HOSTS, OUTAGES, LATE)
def test_no_witness_confirms_that_the_launcher_without_ranks_is_cut_off(
    hosts: set[str], seconds: float, late: list[float]
) -> None:
    network = Network(hosts, late)
    network.run(5)
    network.run(seconds, cut=frozenset(hosts))
    network.run(5)
    assert not network.confirmed
    assert not network.unconfirmed or seconds > MOST - 0.5
    assert set(network.unconfirmed) == hosts or seconds < MOST + 0.5


@given(SEVERAL, OUTAGES, LATE)
def test_no_host_is_given_up_early_when_all_others_fall_silent_at_once(
    hosts: set[str], seconds: float, late: list[float]
) -> None:
    network = Network(hosts | {HOME}, late)
    network.run(5)
    network.run(seconds, cut=frozenset(hosts))
    network.run(5)
    assert not network.confirmed
    assert not network.unconfirmed or seconds > MOST - 0.5


@given(SEVERAL, st.booleans(), st.sampled_from(OTHERS), LATE)
def test_one_host_of_several_that_falls_silent_is_given_up_in_time(
    hosts: set[str], own: bool, dead: str, late: list[float]
) -> None:
    network = Network(hosts | ({HOME} if own else set()), late)
    network.run(5)
    cut_at = network.now
    network.run(5, cut=frozenset([dead]))
    assert set(network.confirmed) == {dead} & hosts and not network.unconfirmed
    assert all(at - cut_at <= 1.7 for at in network.confirmed.values())


@given(LATE)
def test_only_other_host_is_given_up_in_time_when_it_falls_silent(late: list[float]) -> None:
    network = Network({"a", HOME}, late)
    network.run(5)
    cut_at = network.now
    network.run(5, cut=frozenset("a"))
    assert set(network.confirmed) == {"a"}
    assert network.confirmed["a"] - cut_at <= 1.7


def test_host_that_cannot_continue_alone_is_no_witness() -> None:
    detector = _beating(["a", "b"])
    detector.witnesses = {"a"}
    for beat in range(20):
        now = 1004 + beat * BEAT_SECONDS
        detector.heard("b", now, heartbeat=True)
        early = [silence for silence in detector.look(now) if now < 1004 + MOST]
        assert not early, "no rank could continue without those of a"


def test_host_that_returns_at_once_raises_the_bound_of_all() -> None:
    detector = _beating(["a", "b"])
    for beat in range(1, 6):
        detector.heard("b", 1004 + beat * BEAT_SECONDS, heartbeat=True)
    (silence,) = detector.look(1005.25)
    assert silence.confirmed and silence.bound == LEAST
    detector.give_up("a")
    detector.connected("a", local=False, now=1005.4)  # 1.4 s after its last message
    for beat in range(1, 20):
        for host in "ab":
            detector.heard(host, 1005.4 + beat * BEAT_SECONDS, heartbeat=True)
    for beat in range(20, 33):
        detector.heard("b", 1005.4 + beat * BEAT_SECONDS, heartbeat=True)
    assert not detector.look(1005.4 + 19 * BEAT_SECONDS + 2.5)
    assert detector.look(1005.4 + 19 * BEAT_SECONDS + 2.9)


def test_output_of_ranks_shows_that_their_host_responds() -> None:
    detector = _beating(["a", "b"])
    for tenth in range(50):  # heartbeats wait behind a flood of output
        now = 1004 + tenth / 10
        detector.heard("a", now, heartbeat=False)
        detector.heard("b", now, heartbeat=True)
        assert not detector.look(now)


def test_common_silence_needs_no_per_host_statistics() -> None:
    """With a thousand hosts they would take longer than the interval between two looks."""
    detector = _beating(OTHERS)
    with patch.object(TrackedHost, "bound", side_effect=AssertionError):
        assert not detector.look(1006.9)


def test_punctual_heartbeats_need_no_statistics() -> None:
    """With a thousand hosts they would take more than a core: each has 512 delays."""
    detector = _beating(["a"], until=1001.0)
    with patch.object(TrackedHost, "bound", side_effect=AssertionError):
        for beat in range(5, 30):
            detector.heard("a", 1000 + beat * BEAT_SECONDS, heartbeat=True)
            detector.look(1000 + beat * BEAT_SECONDS + 0.2)
    assert detector.longest == BEAT_SECONDS
