"""Phi-accrual failure detector: decides how long a process may be silent before it counts as gone.

N. Hayashibara, X. Defago, R. Yared, T. Katayama: The phi accrual failure detector (SRDS 2004).
Heartbeats arrive at a steady pace, and the detector keeps the delays between them. The longer
the silence, the less likely it is that the next heartbeat is merely late:

    phi = -log10 P(a heartbeat arrives later than this),  delays taken as normally distributed

Delays under load have a longer tail than a normal distribution. The bound is therefore at least
twice the longest delay of that process, and always lies between a minimum and a maximum.

Silence is evidence against a process only while heartbeats of another process arrive. If all
processes fall silent at once, the likely cause is the listener's own link or a network that drops
datagrams. FailureDetector therefore measures silence on a clock that stops while no heartbeat of a
witness arrives.

The detector only classifies. heartbeats.py receives the heartbeats and passes the verdicts to the
driver, which gives the process up and ends the generation (driver.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import erfc, log10, sqrt
from statistics import NormalDist, fmean

# At this phi one of 100 million heartbeats is later.
_PHI = 8.0
_DEVIATIONS = -NormalDist().inv_cdf(10**-_PHI)
_LEAST_DEVIATION = 0.05  # seconds; no scheduler is more regular
_TAIL = 2.0  # times the longest delay
_WINDOW = 512  # delays kept: two minutes
_ENOUGH = 8  # delays needed for a verdict

BEAT_SECONDS = 0.25  # between two heartbeats of a process
_LEAST_SECONDS = 1.0  # lower limit of the bound, whatever the delays
# A process that responds over TCP after this much silence is alive: its datagrams are lost.
_OVERDUE_SECONDS = 1.5 * BEAT_SECONDS
# Limit of the wait while no witness sends heartbeats. A TCP connection over a dead link ends long
# before.
_NO_WITNESS_SECONDS = 60.0
THIS_HOST = ""


class TrackedProcess:
    """State of a process as its heartbeats show it. All times are in seconds.

    Args:
        host: address of its host, or THIS_HOST.
        now: arrival time of the first heartbeat, by any monotonic clock.

    Attributes:
        last: arrival time of the last heartbeat, plus the time excused by `excuse`.
        given_up: the process counts as gone.
        answered: the process responded over TCP after its heartbeats were overdue, or while
            acknowledgements did not reach it. Until an acknowledged heartbeat, its silence shows
            only that datagrams are lost.
    """

    def __init__(self, host: str, now: float) -> None:
        self.host, self.last = host, now
        self.given_up = self.answered = False
        self._delays: deque[float] = deque(maxlen=_WINDOW)

    def record(self, now: float) -> None:
        """Record a heartbeat."""
        self._delays.append(now - self.last)
        self.last = now

    def excuse(self, seconds: float) -> None:
        """Excuse `seconds` of silence during which no heartbeat could be received."""
        self.last += seconds

    @property
    def enough(self) -> bool:
        """Whether enough delays are recorded for a bound."""
        return len(self._delays) >= _ENOUGH

    def silence(self, now: float) -> float:
        """Seconds since the last heartbeat."""
        return now - self.last

    def bound(self, least: float, most: float) -> float | None:
        """Return the longest silence that counts as a delay, from `least` to `most`.

        None: too few heartbeats have arrived.
        """
        if not self.enough:
            return None
        mean, deviation = self._normal()
        likely = max(mean + _DEVIATIONS * deviation, _TAIL * max(self._delays))
        return min(most, max(least, likely))

    def phi(self, now: float) -> float:
        """Return phi, see the top of this file; 0 before the second heartbeat."""
        if not self._delays:
            return 0.0
        mean, deviation = self._normal()
        later = erfc((self.silence(now) - mean) / deviation / sqrt(2)) / 2
        return -log10(max(later, 1e-300))

    def _normal(self) -> tuple[float, float]:
        mean = fmean(self._delays)
        variance = fmean((delay - mean) ** 2 for delay in self._delays)
        return mean, max(_LEAST_DEVIATION, sqrt(variance))


@dataclass(frozen=True)
class Silence:
    """Silence of a process.

    Args:
        number: of the process.
        seconds: length of the silence.
        bound: silence in seconds beyond which the process counts as gone.
        phi: see the top of this file.
    """

    number: int
    seconds: float
    bound: float
    phi: float


@dataclass
class Verdicts:
    """Result of one check of all processes.

    Args:
        silent: processes that are gone.
        lost_datagrams: processes that are alive, but whose datagrams do not arrive.
        common_silence: longest silence in seconds that no witness confirms; 0 = none.
    """

    silent: list[Silence] = field(default_factory=list)
    lost_datagrams: list[Silence] = field(default_factory=list)
    common_silence: float = 0.0


class FailureDetector:
    """Decide from heartbeats which processes are gone. Pure: the caller passes the time.

    Witnesses are the ranks of the current generation, because these ranks continue without a
    process that is given up. If ranks run on two or more other hosts, only ranks on other hosts
    are witnesses for each other: a link that fails at this host silences all other hosts at once,
    but no rank of this host. If ranks run on a single other host, any failed link cuts them off
    from the ranks of this host, so all ranks are witnesses for them.

    Args:
        most: the longest bound, in seconds.

    Attributes:
        longest, phi: the longest heartbeat delay that raised no alarm, in seconds, and its phi.
    """

    def __init__(self, most: float) -> None:
        self._tracked: dict[int, TrackedProcess] = {}
        self._ranks: frozenset[int] = frozenset()
        # Last heartbeat of a witness. Key: False = on any host, True = on another host.
        self._witnessed: dict[bool, float] = {}
        self._several = False  # ranks run on two or more other hosts
        self._least, self._most = _LEAST_SECONDS, most
        self.longest, self.phi = 0.0, 0.0

    def begin(self, ranks: Iterable[int], most: float) -> None:
        """Begin a generation of these processes; `most`: the longest bound, in seconds."""
        self._ranks, self._most = frozenset(ranks), most

    def drop(self, number: int) -> None:
        """Forget a process that has ended."""
        self._tracked.pop(number, None)

    def mute(self, number: int, host: str, now: float) -> None:
        """Suspend verdicts on a process until `_ENOUGH` more delays are recorded."""
        self._tracked[number] = TrackedProcess(host, now)

    def beat(self, number: int, host: str, now: float, acknowledged: bool = True) -> Silence | None:
        """Record a heartbeat; return the silence that it ends if the process was given up.

        Args:
            acknowledged: acknowledgements reach the process; if not, it also reports over TCP.
        """
        tracked, back = self._tracked.get(number), None
        if tracked is None:
            self.mute(number, host, now)
        else:
            silence = tracked.silence(now)
            if tracked.given_up:
                # A false alarm: from now on tolerate twice this delay of every process.
                back = Silence(number, silence, self._least, tracked.phi(now))
                self._least = min(self._most, max(self._least, 2 * silence))
            elif silence > self.longest:
                self.longest, self.phi = silence, tracked.phi(now)
        if number in self._ranks:
            self._witness(host, now)
        if tracked is not None:
            tracked.record(now)
            tracked.given_up, tracked.answered = False, not acknowledged
        return back

    def answered(self, number: int, now: float) -> None:
        """Record a request of a process over TCP; safe to call from any thread."""
        tracked = self._tracked.get(number)
        if tracked is not None and tracked.silence(now) > _OVERDUE_SECONDS:
            tracked.answered = True

    def look(self, now: float) -> Verdicts:
        """Return the verdicts on all processes; mute those in `lost_datagrams`."""
        verdicts, processes = Verdicts(), list(self._tracked.items())
        ranks = [one for number, one in processes if number in self._ranks and not one.given_up]
        self._several = len({rank.host for rank in ranks} - {THIS_HOST}) > 1
        for number, tracked in processes:
            seconds = tracked.silence(now)
            if tracked.given_up or seconds <= self._least or not tracked.enough:
                continue  # nearly all processes: skip the arithmetic
            confirmed = tracked.silence(self._confirmed(tracked, now))
            if confirmed <= self._least and not tracked.answered:
                # A thousand processes may get here at once: for them the arithmetic below would
                # take longer than the time between two checks.
                verdicts.common_silence = max(verdicts.common_silence, seconds)
                continue
            bound = tracked.bound(self._least, self._most)
            if bound is None or seconds <= bound:
                continue
            silence = Silence(number, seconds, bound, tracked.phi(now))
            if tracked.answered:
                verdicts.lost_datagrams.append(silence)
                self.mute(number, tracked.host, now)
            elif confirmed > bound:
                verdicts.silent.append(silence)
            else:
                verdicts.common_silence = max(verdicts.common_silence, seconds)
        return verdicts

    def give_up(self, number: int) -> None:
        """Count a process as gone until its heartbeats arrive again."""
        tracked = self._tracked.get(number)
        if tracked is not None:
            tracked.given_up = True

    def _witness(self, host: str, now: float) -> None:
        """Record a witness; excuse the time without one from the silence of other processes."""
        for elsewhere in {False, host != THIS_HOST}:
            before = self._witnessed.get(elsewhere, now)
            unwitnessed = now - before - BEAT_SECONDS
            if unwitnessed > 0:
                for other in list(self._tracked.values()):
                    if self._needs_witness_elsewhere(other) == elsewhere:
                        # A process that is not a witness may have sent a heartbeat meanwhile.
                        other.excuse(min(unwitnessed, other.silence(now)))
            self._witnessed[elsewhere] = now

    def _confirmed(self, tracked: TrackedProcess, now: float) -> float:
        """Return the time until which witnesses confirm that its heartbeats could arrive."""
        witnessed = self._witnessed.get(self._needs_witness_elsewhere(tracked))
        if witnessed is None:
            return tracked.last
        return now if now - witnessed > _NO_WITNESS_SECONDS else min(now, witnessed + BEAT_SECONDS)

    def _needs_witness_elsewhere(self, tracked: TrackedProcess) -> bool:
        return self._several and tracked.host != THIS_HOST
