"""How long a process may keep silent before it counts as gone: phi-accrual, without a clock.

N. Hayashibara, X. Defago, R. Yared, T. Katayama: The phi accrual failure detector (SRDS 2004).
Beats come at a steady pace; the delays between them are kept. The longer the silence, the less
likely it is that the next beat is merely late:

    phi = -log10 P(a beat comes later than this),  delays taken as normally distributed

Delays under load have a longer tail than that. So a process may, besides, keep silent for twice
the longest delay seen of it, and the bound stays between a least and a most in any case.

Silence is evidence against a process only while another one is heard: if all fall silent at
once, the listener's own link or the network's treatment of datagrams is the likely cause.
FailureDetector therefore measures silence on a clock that stops when no witness is heard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import erfc, log10, sqrt
from statistics import NormalDist, fmean

# With this phi one of 100 million beats comes later.
_PHI = 8.0
_DEVIATIONS = -NormalDist().inv_cdf(10**-_PHI)
_LEAST_DEVIATION = 0.05  # seconds; as good as that no scheduler is
_TAIL = 2.0  # times the longest delay
_WINDOW = 512  # delays kept: two minutes
_ENOUGH = 8  # delays before there is a verdict

BEAT_SECONDS = 0.25  # from one beat of a process to its next
_LEAST_SECONDS = 1.0  # that a process may be silent, whatever was seen
# A process that answers over TCP after this much silence is alive: its datagrams are lost.
_OVERDUE_SECONDS = 1.5 * BEAT_SECONDS
# Bound of the wait while no witness is heard. A connection over a dead link ends long before.
_NO_WITNESS_SECONDS = 60.0
THIS_HOST = ""


class Arrivals:
    """The beats of one process, as they came in. All times in seconds.

    Args:
        now: when the first one came, by any clock that never goes back.

    Attributes:
        last: when the last one came; later by the time that `forgive` excused.
    """

    def __init__(self, now: float) -> None:
        self.last = now
        self._delays: deque[float] = deque(maxlen=_WINDOW)

    def heard(self, now: float) -> None:
        """A beat came in."""
        self._delays.append(now - self.last)
        self.last = now

    def forgive(self, seconds: float) -> None:
        """Nobody listened for so long."""
        self.last += seconds

    @property
    def enough(self) -> bool:
        """Whether enough delays were seen for a bound."""
        return len(self._delays) >= _ENOUGH

    def silence(self, now: float) -> float:
        """Since the last beat."""
        return now - self.last

    def bound(self, least: float, most: float) -> float | None:
        """The longest silence that may be a delay, from `least` to `most`.

        None: too few beats were seen to say.
        """
        if not self.enough:
            return None
        mean, deviation = self._normal()
        likely = max(mean + _DEVIATIONS * deviation, _TAIL * max(self._delays))
        return min(most, max(least, likely))

    def phi(self, now: float) -> float:
        """How unlikely it is that the next beat is merely late; 0 before the second beat."""
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
    """A process was not heard any more.

    Args:
        number: of the process.
        seconds: for so long.
        bound: that it might have been without being taken for gone.
        phi: see the top of this file.
    """

    number: int
    seconds: float
    bound: float
    phi: float


@dataclass
class _Heard:
    """A process as its beats show it.

    Args:
        host: address of its host, or THIS_HOST.
        given_up: it counts as gone.
        answered: over TCP, after its beats were overdue or while acknowledgements did not reach
            it: until an acknowledged beat, its silence shows only that datagrams are lost.
    """

    host: str
    arrivals: Arrivals
    given_up: bool = False
    answered: bool = False


@dataclass
class Verdicts:
    """Result of one look at all processes.

    Args:
        silent: processes that are gone.
        unheard: processes that are alive, but whose datagrams do not arrive.
        deaf: longest silence of a process that no witness confirms; 0 = there is none.
    """

    silent: list[Silence] = field(default_factory=list)
    unheard: list[Silence] = field(default_factory=list)
    deaf: float = 0.0


class FailureDetector:
    """Decides from heartbeats which processes are gone. Pure: the caller passes the time.

    Witnesses are the ranks of the current generation, because they are the ones that continue
    without a process that is given up. If ranks run on two or more other hosts, only these
    witness for each other: a link that fails at this host silences all other hosts at once, but
    no rank of this host. Ranks of a single other host are cut off from the ranks of this host
    whichever link has failed, so all ranks witness for them.

    Args:
        most: the longest bound, in seconds.

    Attributes:
        longest, phi: the longest delay of a beat that was no alarm, in seconds, and its phi.
    """

    def __init__(self, most: float) -> None:
        self._heard: dict[int, _Heard] = {}
        self._ranks: frozenset[int] = frozenset()
        # When a witness was heard: on any host, and on another host than this.
        self._witnessed: dict[bool, float] = {}
        self._several = False  # ranks run on two or more other hosts
        self._least, self._most = _LEAST_SECONDS, most
        self.longest, self.phi = 0.0, 0.0

    def begin(self, ranks: Iterable[int], most: float) -> None:
        """A generation of these processes begins."""
        self._ranks, self._most = frozenset(ranks), most

    def drop(self, number: int) -> None:
        """A process has ended."""
        self._heard.pop(number, None)

    def mute(self, number: int, host: str, now: float) -> None:
        """Judges a process only after `_ENOUGH` more beats."""
        self._heard[number] = _Heard(host, Arrivals(now))

    def beat(self, number: int, host: str, now: float, acknowledged: bool = True) -> Silence | None:
        """A beat arrived; returns the silence that it ends, if the process had been given up.

        Args:
            acknowledged: acknowledgements reach the process; if not, it reports over TCP, too.
        """
        heard, back = self._heard.get(number), None
        if heard is None:
            self.mute(number, host, now)
        else:
            silence, phi = heard.arrivals.silence(now), heard.arrivals.phi(now)
            if heard.given_up:
                # It is alive: from here on all may be as late as this.
                back = Silence(number, silence, self._least, phi)
                self._least = min(self._most, max(self._least, 2 * silence))
            elif silence > self.longest:
                self.longest, self.phi = silence, phi
        if number in self._ranks:
            self._witness(host, now)
        if heard is not None:
            heard.arrivals.heard(now)
            heard.given_up, heard.answered = False, not acknowledged
        return back

    def answered(self, number: int, now: float) -> None:
        """A process has sent a request over TCP; safe to call from any thread."""
        heard = self._heard.get(number)
        if heard is not None and heard.arrivals.silence(now) > _OVERDUE_SECONDS:
            heard.answered = True

    def look(self, now: float) -> Verdicts:
        """Judges all processes; those that are `unheard` are muted."""
        verdicts, processes = Verdicts(), list(self._heard.items())
        ranks = [one for number, one in processes if number in self._ranks and not one.given_up]
        self._several = len({rank.host for rank in ranks} - {THIS_HOST}) > 1
        for number, heard in processes:
            seconds = heard.arrivals.silence(now)
            if heard.given_up or seconds <= self._least or not heard.arrivals.enough:
                continue  # nearly all: no more arithmetic
            confirmed = heard.arrivals.silence(self._confirmed(heard, now))
            if confirmed <= self._least and not heard.answered:
                # A thousand processes may be here at once: the arithmetic below would take longer
                # than the time between two looks.
                verdicts.deaf = max(verdicts.deaf, seconds)
                continue
            bound = heard.arrivals.bound(self._least, self._most)
            if bound is None or seconds <= bound:
                continue
            silence = Silence(number, seconds, bound, heard.arrivals.phi(now))
            if heard.answered:
                verdicts.unheard.append(silence)
                self.mute(number, heard.host, now)
            elif confirmed > bound:
                verdicts.silent.append(silence)
            else:
                verdicts.deaf = max(verdicts.deaf, seconds)
        return verdicts

    def give_up(self, number: int) -> None:
        """A process counts as gone until it is heard again."""
        heard = self._heard.get(number)
        if heard is not None:
            heard.given_up = True

    def _witness(self, host: str, now: float) -> None:
        """Excuses the time in which no witness was heard from the silence of the others."""
        for elsewhere in {False, host != THIS_HOST}:
            before = self._witnessed.get(elsewhere, now)
            unheard = now - before - BEAT_SECONDS
            if unheard > 0:
                for other in list(self._heard.values()):
                    if self._needs_witness_elsewhere(other) == elsewhere:
                        # One that is no witness itself may have been heard meanwhile.
                        other.arrivals.forgive(min(unheard, other.arrivals.silence(now)))
            self._witnessed[elsewhere] = now

    def _confirmed(self, heard: _Heard, now: float) -> float:
        """The time until which witnesses confirm that this process could have been heard."""
        witnessed = self._witnessed.get(self._needs_witness_elsewhere(heard))
        if witnessed is None:
            return heard.arrivals.last
        return now if now - witnessed > _NO_WITNESS_SECONDS else min(now, witnessed + BEAT_SECONDS)

    def _needs_witness_elsewhere(self, heard: _Heard) -> bool:
        return self._several and heard.host != THIS_HOST
