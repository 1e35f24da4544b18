"""How long a process may keep silent before it counts as gone: phi-accrual, without a clock.

N. Hayashibara, X. Defago, R. Yared, T. Katayama: The phi accrual failure detector (SRDS 2004).
Beats come at a steady pace; the delays between them are kept. The longer the silence, the less
likely it is that the next beat is merely late:

    phi = -log10 P(a beat comes later than this),  delays taken as normally distributed

Delays under load have a longer tail than that. So a process may, besides, keep silent for twice
the longest delay seen of it, and the bound stays between a least and a most in any case.
"""

from __future__ import annotations

from collections import deque
from math import erfc, log10, sqrt
from statistics import NormalDist, fmean

# With this phi one of 100 million beats comes later.
_PHI = 8.0
_DEVIATIONS = -NormalDist().inv_cdf(10**-_PHI)
_LEAST_DEVIATION = 0.05  # seconds; as good as that no scheduler is
_TAIL = 2.0  # times the longest delay
_WINDOW = 512  # delays kept: two minutes
_ENOUGH = 8  # delays before there is a verdict


class Arrivals:
    """The beats of one process, as they came in. All times in seconds.

    Args:
        now: when the first one came, by any clock that never goes back.
    """

    def __init__(self, now: float) -> None:
        self._last = now
        self._delays: deque[float] = deque(maxlen=_WINDOW)

    def heard(self, now: float) -> None:
        """A beat came in."""
        self._delays.append(now - self._last)
        self._last = now

    def forgive(self, seconds: float) -> None:
        """Nobody listened for so long."""
        self._last += seconds

    def silence(self, now: float) -> float:
        """Since the last beat."""
        return now - self._last

    def bound(self, least: float, most: float) -> float | None:
        """The longest silence that may be a delay, from `least` to `most`.

        None: too few beats were seen to say.
        """
        if len(self._delays) < _ENOUGH:
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
