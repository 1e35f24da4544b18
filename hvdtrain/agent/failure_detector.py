"""Phi-accrual failure detector: decides how long a host may be silent before it counts as gone.

N. Hayashibara, X. Defago, R. Yared, T. Katayama: The phi accrual failure detector (SRDS 2004).
Heartbeats of an agent arrive at a steady pace, and the detector keeps the delays between them and
the messages before. The longer the silence, the less likely it is that the next heartbeat is merely
late:

    phi = -log10 P(a heartbeat arrives later than this),  delays taken as normally distributed

Delays under load have a longer tail than a normal distribution. The bound is therefore at least
twice the longest delay of that host, and always lies between a minimum and a maximum.

The detector only classifies; the hub gives a silent host up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from math import sqrt
from statistics import NormalDist, fmean
from typing import NamedTuple

from hvdtrain.agent.protocol import BEAT_SECONDS

# At this phi one of 100 million heartbeats is later.
_PHI = 8.0
_DEVIATIONS = -NormalDist().inv_cdf(10**-_PHI)
_LEAST_DEVIATION = 0.05  # seconds; no scheduler is more regular
_TAIL = 2.0  # times the longest delay
_WINDOW = 512  # delays kept: two minutes
_ENOUGH = 8  # delays needed for a bound below the maximum

_LEAST_SECONDS = 1.0  # lower limit of the bound, whatever the delays


class Silence(NamedTuple):
    """Silence of a host.

    Args:
        seconds: length of the silence.
        bound: silence in seconds beyond which the host counts as gone.
        confirmed: a witness has sent messages for longer than `bound` meanwhile. If not, the
            silence has only lasted longer than any bound.
    """

    host: str
    seconds: float
    bound: float
    confirmed: bool


class TrackedHost:
    """What a host's messages show. All times are in seconds.

    Args:
        local: it is the listener's host.
        now: arrival time of the first message, by any monotonic clock.

    Attributes:
        last: arrival time of the last message, plus the time excused by `excuse`.
    """

    def __init__(self, local: bool, now: float) -> None:
        self.local, self.last = local, now
        self._delays: deque[float] = deque(maxlen=_WINDOW)

    def record(self, now: float) -> None:
        """Record a heartbeat."""
        self._delays.append(now - self.last)
        self.last = now

    def excuse(self, seconds: float, now: float) -> None:
        """Excuse up to `seconds` of silence during which no message could arrive."""
        self.last += max(0.0, min(seconds, self.silence(now)))

    def silence(self, now: float) -> float:
        """Seconds since the last message."""
        return now - self.last

    def bound(self, least: float, most: float) -> float:
        """Return the longest silence that counts as a delay, from `least` to `most`.

        It is `most` until enough heartbeats have arrived.
        """
        if len(self._delays) < _ENOUGH:
            return most
        mean = fmean(self._delays)
        variance = fmean((delay - mean) ** 2 for delay in self._delays)
        deviation = max(_LEAST_DEVIATION, sqrt(variance))
        likely = max(mean + _DEVIATIONS * deviation, _TAIL * max(self._delays))
        return min(most, max(least, likely))


class FailureDetector:
    """Decide from messages which hosts are gone. Pure: the caller passes the time.

    Silence is evidence against a host only while a witness sends messages. If all hosts fall silent
    at once, the likely cause is the listener's own link. Silence is therefore measured on a clock
    that stops while no witness sends a message.

    If there are witnesses on two or more other hosts, only other hosts are witnesses for each
    other: a link that fails at this host silences all of them at once, but not this host. If there
    is only one, any failed link cuts it off from this host, so this host is a witness, too.

    Args:
        most: the longest bound, in seconds.

    Attributes:
        witnesses: hosts that can continue the run without a host that is given up.
        longest: the longest heartbeat delay that raised no alarm, in seconds.
    """

    def __init__(self, most: float) -> None:
        self._hosts: dict[str, TrackedHost] = {}
        self.witnesses: Set[str] = frozenset()
        # Last message of a witness. Key: False = of any host, True = of another host.
        self._witnessed: dict[bool, float] = {}
        self._several = False  # witnesses on two or more other hosts
        self._given_up: dict[str, float] = {}  # host -> time of its last message
        self._least, self._most = _LEAST_SECONDS, most
        self.longest = 0.0

    def connected(self, host: str, local: bool, now: float) -> None:
        """Begin to judge a host; `local`: it is this host."""
        if (last := self._given_up.pop(host, None)) is not None and now - last < self._most:
            # A false alarm: from now on tolerate twice this delay of every host.
            self._least = min(self._most, max(self._least, 2 * (now - last)))
        self._hosts[host] = TrackedHost(local, now)

    def disconnected(self, host: str) -> None:
        """Do not judge a host until it is connected again."""
        self._hosts.pop(host, None)

    def give_up(self, host: str) -> None:
        """Count a silent host as gone until it is connected again."""
        self._given_up[host] = self._hosts.pop(host).last

    def heard(self, host: str, now: float, heartbeat: bool) -> None:
        """Record a message of a host that is connected."""
        tracked = self._hosts.get(host)
        if tracked is None:
            return
        if host in self.witnesses:
            self._witness(tracked, now)
        if heartbeat:
            self.longest = max(self.longest, tracked.silence(now))
            tracked.record(now)
        else:
            tracked.last = now

    def excuse(self, seconds: float, now: float) -> None:
        """Excuse a time in which this process did not run."""
        for tracked in self._hosts.values():
            tracked.excuse(seconds, now)

    def silence(self, host: str, now: float) -> float:
        """Return the seconds since the last message of a host; 0 if it is not connected."""
        tracked = self._hosts.get(host)
        return 0.0 if tracked is None else tracked.silence(now)

    def look(self, now: float) -> list[Silence]:
        """Return the hosts that have been silent for too long."""
        elsewhere = [h for h, one in self._hosts.items() if h in self.witnesses and not one.local]
        self._several = len(elsewhere) > 1
        silences = []
        for host, tracked in self._hosts.items():
            seconds = tracked.silence(now)
            if seconds <= self._least:
                continue  # nearly all hosts: skip the arithmetic
            confirmed = tracked.silence(self._confirmed(tracked, now))
            if confirmed <= self._least and seconds <= self._most:
                # A thousand hosts may get here at once: for them the arithmetic below would take
                # longer than the time between two looks.
                continue
            bound = tracked.bound(self._least, self._most)
            if confirmed > bound or seconds > self._most:
                silences.append(Silence(host, seconds, bound, confirmed > bound))
        return silences

    def _witness(self, witness: TrackedHost, now: float) -> None:
        """Record a witness; excuse the time without one from the silence of other hosts."""
        for elsewhere in {False, not witness.local}:
            unwitnessed = now - self._witnessed.get(elsewhere, now) - BEAT_SECONDS
            if unwitnessed > 0:
                for other in self._hosts.values():
                    if self._needs_witness_elsewhere(other) == elsewhere:
                        other.excuse(unwitnessed, now)
            self._witnessed[elsewhere] = now

    def _confirmed(self, tracked: TrackedHost, now: float) -> float:
        """Return the time until which a witness confirms that its messages could arrive."""
        witnessed = self._witnessed.get(self._needs_witness_elsewhere(tracked), tracked.last)
        return min(now, witnessed + BEAT_SECONDS)

    def _needs_witness_elsewhere(self, tracked: TrackedHost) -> bool:
        return self._several and not tracked.local
