"""Checks of each host alone, to name a slow host before all others wait for it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from hvdtrain.doctor.finding import WARNING, Finding
from hvdtrain.doctor.session import Session, together

_SLOW = 0.7  # fraction of the median
_LOAD_SECONDS, _SECONDS = 60.0, 60.0

Speeds = dict[str, dict[str, float]]


def measure(sessions: Mapping[str, Session]) -> Speeds:
    """Host -> quantity -> speed; see host_speed.py. Measure again if a host is slow."""
    able = together(sessions.values(), lambda session: session.ask("load", _LOAD_SECONDS))
    speeds = _measure(sessions, able)
    # Measure all hosts again, because speeds are compared with simultaneous measurements.
    if slow(speeds):
        again = _measure(sessions, able)
        if len(slow(again)) < len(slow(speeds)):
            return again
    return speeds


def _measure(sessions: Mapping[str, Session], able: Mapping[str, bool]) -> Speeds:
    return together([sessions[n] for n in able], lambda session: session.ask("speed", _SECONDS))


def slow(speeds: Speeds) -> dict[tuple[str, str], float]:
    """(host, quantity) -> fraction of the median of all hosts, if the host is slow.

    The higher of the two middle values counts, so of two hosts the slower one is compared with the
    other.
    """
    found: dict[tuple[str, str], float] = {}
    for what in sorted({name for theirs in speeds.values() for name in theirs}):
        known = {host: theirs[what] for host, theirs in speeds.items() if what in theirs}
        usual = statistics.median_high(known.values())
        found |= {(host, what): value / usual for host, value in known.items()}
    return {key: part for key, part in found.items() if part < _SLOW}


def check(speeds: Speeds) -> list[Finding]:
    """Return one finding for each slow host and quantity."""
    kinds = {"processor": ("GFLOP/s", 1e9), "memory": ("GB/s", 1e9)}
    found = []
    for (host, what), part in slow(speeds).items():
        unit, scale = kinds.get(what, ("TFLOP/s", 1e12))
        if what.endswith("memory"):
            unit, scale = kinds["memory"]
        look = "nvidia-smi -q -d CLOCK,PERFORMANCE" if what.startswith("gpu") else "top -b -n 1"
        found.append(
            Finding(
                "slow host",
                host,
                f"{what}: {speeds[host][what] / scale:.3g} {unit}, {part:.0%} of the median host",
                "every step waits for the slowest host",
                f"{look} | head -20   # on {host}: other programs, quotas, clocks; or leave it "
                "out, or --batch.deal speed gives it fewer micro-batches",
                WARNING,
            )
        )
    return found
