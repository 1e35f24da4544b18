"""Summary of RUN/profile: time per rank, late ranks, most expensive operators.

Reads only files; imports neither torch nor Horovod.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.telemetry.profile_files import (
    COMPUTE,
    READY,
    RankProfile,
    read_profiles,
    timeline_path,
)
from hvdtrain.untrusted import number, open_regular, parse_json

_OPERATORS = 10
# Fraction of the step time; a rank that costs less is not reported.
_WORTH_TELLING = 0.05
# More than the size of a trace of a hundred steps; a small gzip file can expand to any size.
_TRACE_BYTES = 2 << 30
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(frozen=True)
class RankTime:
    """Time of one rank, in seconds; compute + exposed + other is the wall time.

    Args:
        compute: data, forward, backward and optimizer
        exposed: waiting for communication
        overlapped: communication in flight during compute; included in `compute`
        other: the rest: evaluation, checkpoints, callbacks, idle
    """

    profile: RankProfile
    compute: float
    exposed: float
    overlapped: float
    other: float


@dataclass(frozen=True)
class Lateness:
    """Lateness of one rank at the ends of the backward passes, from Horovod's readiness ticks.

    Args:
        last: number of steps in which it was the last rank
        mean_seconds, max_seconds: delay after the first rank
    """

    rank: int
    last: int
    mean_seconds: float
    max_seconds: float


@dataclass(frozen=True)
class Operator:
    """Args: seconds: excluding called operators, over all ranks and calls."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Part:
    """Consecutively profiled steps.

    Args:
        steps: first step, and the one after the last
        lateness: by rank; empty without a timeline
        late: the rank that delayed the others; None if there was none
        operators: those that took the longest; on a GPU, kernels
        problems: files that could not be read, and other missing data
    """

    steps: tuple[int, int]
    ranks: list[RankTime]
    lateness: list[Lateness]
    late: int | None
    operators: list[Operator]
    problems: list[str]


def summarise(run: Path) -> list[Part]:
    """Summaries of a run's profiles, in the order of their first steps.

    Raises:
        UserError: there is none.
    """
    profiles = list(read_profiles(run / "profile"))
    if not profiles:
        raise UserError(
            f"{run}/profile holds no profile; train with --profile.steps FIRST:END to get one"
        )
    parts = groupby(profiles, key=lambda one: one[0].steps[0])
    return [_part(run / "profile", list(group)) for _, group in parts]


def _part(directory: Path, profiles: list[tuple[RankProfile, Path]]) -> Part:
    problems: list[str] = []
    ranks = [rank_time(profile) for profile, _ in profiles]
    steps = profiles[0][0].steps
    seconds = mean(profile.wall_seconds for profile, _ in profiles) / (steps[1] - steps[0])
    lateness: list[Lateness] = []
    if profiles[0][0].world_size > 1:
        events = _events(timeline_path(directory, steps[0]), problems)
        lateness = read_lateness(events)
        if events and not lateness:
            problems.append("Horovod's timeline says of no rank when it was ready")
    traces = (_events(path, problems) for _, path in profiles)
    return Part(steps, ranks, lateness, _late(lateness, seconds), top_operators(traces), problems)


def rank_time(profile: RankProfile) -> RankTime:
    """Split the wall time of one rank."""
    compute = sum(profile.phases[name] for name in COMPUTE)
    exposed = profile.phases["comm_exposed"]
    overlapped = max(0.0, profile.inflight_seconds - exposed)
    return RankTime(profile, compute, exposed, overlapped, profile.wall_seconds - compute - exposed)


def _events(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The events of a Chrome trace, plain or gzipped; events with invalid fields are dropped."""
    try:
        with open_regular(path) as plain:
            file = gzip.GzipFile(fileobj=plain) if path.suffix == ".gz" else plain
            data = file.read(_TRACE_BYTES + 1)
        if len(data) > _TRACE_BYTES:
            raise ValueError(f"it has more than {_TRACE_BYTES} bytes")
        content = parse_json(data)
        events = content["traceEvents"] if isinstance(content, dict) else content
        if not isinstance(events, list):
            raise ValueError("it has no list of events")
        return [event for event in events if _is_event(event)]
    except (OSError, EOFError, zlib.error, ValueError, KeyError) as error:
        problems.append(f"{path} cannot be read ({error or type(error).__name__})")
        return []


def _is_event(event: object) -> bool:
    return (
        isinstance(event, dict)
        and all(isinstance(event.get(name, ""), str) for name in ("name", "ph", "cat"))
        and isinstance(event.get("args", {}), dict)
        and all(isinstance(event.get(name, 0), (int, str)) for name in ("pid", "tid"))
        and all(number(event.get(name, 0)) is not None for name in ("ts", "dur"))
    )


def read_lateness(events: Iterable[dict[str, Any]]) -> list[Lateness]:
    """Compute the lateness of ranks from the events of Horovod's timeline: the time ("ts",
    microseconds) of an event named by a rank says when that rank was ready; "pid" is the tensor."""
    ours: set[int] = set()
    ticks: dict[int, dict[int, float]] = defaultdict(dict)
    for event in events:
        name, pid = event.get("name", ""), event.get("pid", 0)
        if name == "process_name":
            if READY in str(event.get("args", {}).get("name")):
                ours.add(pid)
        elif event.get("ph") == "X" and pid in ours and name.isdecimal() and len(name) < 10:
            ticks[pid][int(name)] = event.get("ts", 0) / 1e6
    steps = [ready for ready in ticks.values() if len(ready) > 1]
    found = []
    for rank in sorted({rank for ready in steps for rank in ready}):
        behind = [ready[rank] - min(ready.values()) for ready in steps if rank in ready]
        last = sum(max(ready, key=lambda r: ready[r]) == rank for ready in steps)
        found.append(Lateness(rank, last, mean(behind), max(behind)))
    return found


def _late(lateness: list[Lateness], step_seconds: float) -> int | None:
    """The rank that came last in most steps, if its delay is significant."""
    if not lateness:
        return None
    worst = max(lateness, key=lambda one: one.mean_seconds)
    most = worst.last > sum(one.last for one in lateness) / 2
    return worst.rank if most and worst.mean_seconds > _WORTH_TELLING * step_seconds else None


def top_operators(traces: Iterable[list[dict[str, Any]]]) -> list[Operator]:
    """The operators that took the longest over all traces: kernels if there are any, else CPU
    operators, excluding the operators that they call."""
    kernels: dict[str, list[float]] = defaultdict(list)
    operators: dict[str, list[float]] = defaultdict(list)
    for events in traces:
        threads = defaultdict(list)
        for event in events:
            if event.get("cat") in _ON_DEVICE:
                kernels[event.get("name", "")].append(event.get("dur", 0))
            elif event.get("cat") == "cpu_op":
                threads[event.get("pid"), event.get("tid")].append(event)
        for calls in threads.values():
            for name, own in _own_times(calls):
                operators[name].append(own)
    found = [Operator(name, sum(t) / 1e6, len(t)) for name, t in (kernels or operators).items()]
    return sorted(found, key=lambda one: -one.seconds)[:_OPERATORS]


def _own_times(calls: list[dict[str, Any]]) -> Iterable[tuple[str, float]]:
    """(name, microseconds excluding nested calls) of the calls of one thread."""
    spans = [(call.get("name", ""), call.get("ts", 0), call.get("dur", 0)) for call in calls]
    ordered = sorted(spans, key=lambda span: (span[1], -span[2]))
    own = [seconds for _, _, seconds in ordered]
    open_calls: list[tuple[float, int]] = []  # (end, index) of the enclosing calls
    for index, (_, start, seconds) in enumerate(ordered):
        while open_calls and open_calls[-1][0] <= start:
            open_calls.pop()
        if open_calls:
            own[open_calls[-1][1]] -= seconds
        open_calls.append((start + seconds, index))
    return [(name, left) for (name, _, _), left in zip(ordered, own, strict=True)]


def to_json(parts: list[Part]) -> str:
    """One JSON object; its fields are those of the classes above."""
    return json.dumps({"parts": [asdict(part) for part in parts]}, indent=1)
