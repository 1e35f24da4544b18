"""RUN/profile: its files, and their summary: time per rank, late ranks, most expensive operators.

    rank_00003_node2.10.pt.trace.json.gz   torch's trace of a rank, from step 10 on
    rank_00003_node2.10.json               its measurements: RankProfile
    timeline.10.json                       Horovod's timeline of the same steps, from rank 0

If a run restarts or enters a new elastic generation inside the range, each section has its own
group of files, distinguished by the first step. Imports neither torch nor Horovod.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.files import write_atomic
from hvdtrain.text import aligned, plural
from hvdtrain.untrusted import checked, number, open_regular, parse_json, read_json

TRACE = ".pt.trace.json.gz"  # suffix that TensorBoard's profile plugin expects
# After their backward pass, ranks exchange a number under this name plus the step number. Horovod
# records when each rank was ready only for names that it has not seen before.
READY = "ready.step_"
COMPUTE = ("data", "forward", "backward", "optimizer")  # phases that count as computation
_PHASES = {*COMPUTE, "comm_exposed"}
_OPERATORS = 10
# Fraction of the step time; a rank that costs less is not reported.
_SIGNIFICANT = 0.05
# More than the size of a trace of a hundred steps; a small gzip file can expand to any size.
_TRACE_BYTES = 2 << 30
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_MIB = 1 << 20


@dataclass(frozen=True)
class RankProfile:
    """Measurements of one rank over some steps.

    Args:
        steps: first step, and the one after the last
        phases: seconds per phase; their sum is the wall time
        wall_seconds: from before the first step to after the last one's callbacks
        inflight_seconds: see Exchange
        host_peak_bytes: resident memory per phase; None if unknown
        device_peak_bytes: tensor memory per phase; None without a GPU
        device: "cpu" or "cuda"
    """

    rank: int
    host: str
    world_size: int
    steps: tuple[int, int]
    phases: dict[str, float]
    wall_seconds: float
    inflight_seconds: float
    host_peak_bytes: dict[str, int] | None
    device_peak_bytes: dict[str, int] | None
    device: str


def rank_path(directory: Path, rank: int, host: str, first: int, suffix: str) -> Path:
    """suffix: TRACE or ".json"."""
    return directory / f"rank_{rank:05}_{host}.{first}{suffix}"


def timeline_path(directory: Path, first: int) -> Path:
    return directory / f"timeline.{first}.json"


def write_measurements(path: Path, measurements: dict[str, Any]) -> None:
    """Write the measurements as JSON; raise OSError on failure."""
    write_atomic(path, (json.dumps(measurements) + "\n").encode())


def clear(directory: Path, first: int) -> None:
    """Delete the files of steps from `first` on, because the run repeats these steps."""
    for path in directory.iterdir():
        name = path.name.removesuffix(TRACE).removesuffix(".json")
        _, _, step = name.rpartition(".")
        if name != path.name and step.isdigit() and int(step) >= first:
            path.unlink(missing_ok=True)


def read_profiles(directory: Path) -> Iterator[tuple[RankProfile, Path]]:
    """Measurements of each rank and section, with the path of the trace, by first step and rank.

    Invalid files are skipped.
    """
    found = []
    for path in directory.glob("rank_*.json"):
        with suppress(OSError, ValueError):
            content = read_json(path)
            if isinstance(content.get("steps"), list):  # JSON has no tuples
                content["steps"] = tuple(content["steps"])
            profile = checked(RankProfile, content)
            seconds = [profile.wall_seconds, profile.inflight_seconds, *profile.phases.values()]
            if None in map(number, seconds) or profile.wall_seconds <= 0:
                raise ValueError("its times are not finite numbers")
            if not set(profile.phases) >= _PHASES or profile.steps[0] >= profile.steps[1]:
                raise ValueError("it lacks phases or steps")
            found.append((profile, path.with_name(path.name.removesuffix(".json") + TRACE)))
    return iter(sorted(found, key=lambda one: (one[0].steps[0], one[0].rank)))


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
class ProfileSection:
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


def summarize(run: Path) -> list[ProfileSection]:
    """Summaries of a run's profiles, in the order of their first steps.

    Raises:
        UserError: there is none.
    """
    profiles = list(read_profiles(run / "profile"))
    if not profiles:
        raise UserError(
            f"{run}/profile contains no profile; train with --profile.steps FIRST:END to record one"
        )
    groups = groupby(profiles, key=lambda one: one[0].steps[0])
    return [_section(run / "profile", list(group)) for _, group in groups]


def _section(directory: Path, profiles: list[tuple[RankProfile, Path]]) -> ProfileSection:
    problems: list[str] = []
    ranks = [rank_time(profile) for profile, _ in profiles]
    steps = profiles[0][0].steps
    seconds = mean(profile.wall_seconds for profile, _ in profiles) / (steps[1] - steps[0])
    lateness: list[Lateness] = []
    if profiles[0][0].world_size > 1:
        events = _events(timeline_path(directory, steps[0]), problems)
        lateness = read_lateness(events)
        if events and not lateness:
            problems.append("Horovod's timeline does not say when any rank was ready")
    traces = (_events(path, problems) for _, path in profiles)
    return ProfileSection(
        steps, ranks, lateness, _late(lateness, seconds), top_operators(traces), problems
    )


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
    return worst.rank if most and worst.mean_seconds > _SIGNIFICANT * step_seconds else None


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


def to_json(sections: list[ProfileSection]) -> str:
    """One JSON object with the fields of the classes above."""
    return json.dumps({"parts": [asdict(section) for section in sections]}, indent=1)


def to_text(sections: Sequence[ProfileSection]) -> str:
    """Tables for each section: time, phases, memory peaks, lateness, operators."""
    return "\n\n".join("\n\n".join(_tables(section)) for section in sections)


def _tables(section: ProfileSection) -> list[str]:
    first, end = section.steps
    count = end - first
    phases = list(section.ranks[0].profile.phases)
    tables = [
        f"steps {first} to {end - 1}, {plural(section.ranks[0].profile.world_size, 'rank')}",
        _table(
            ["time", "ms/step", "compute", "exposed", "other", "overlapped"],
            [[_who(rank), *_shares(rank, count)] for rank in section.ranks],
        ),
        _table(
            ["phase, ms/step", *phases],
            [
                [_who(rank), *(_ms(rank.profile.phases.get(phase, 0.0), count) for phase in phases)]
                for rank in section.ranks
            ],
        ),
        *_memory(section, phases),
        *_lateness(section),
    ]
    if section.operators:
        device = section.ranks[0].profile.device == "cuda"
        rows = [
            [one.name[:70], _ms(one.seconds, count * len(section.ranks)), str(one.calls)]
            for one in section.operators
        ]
        name = "kernel" if device else "operator (own time)"
        tables.append(_table([name, "ms/step and rank", "calls"], rows))
    return tables + [f"note: {problem}" for problem in section.problems]


def _who(rank: RankTime) -> str:
    return f"rank {rank.profile.rank} on {rank.profile.host}"


def _ms(seconds: float, count: int) -> str:
    return f"{seconds / count * 1000:.2f}"


def _shares(rank: RankTime, count: int) -> list[str]:
    wall = rank.profile.wall_seconds
    parts = (rank.compute, rank.exposed, rank.other, rank.overlapped)
    return [_ms(wall, count), *(f"{part / wall:.1%}" for part in parts)]


def _memory(section: ProfileSection, phases: list[str]) -> list[str]:
    tables = []
    for name in ("host", "device"):
        rows = [
            [_who(rank), *(f"{peaks[p] / _MIB:.1f}" if p in peaks else "-" for p in phases)]
            for rank in section.ranks
            if (peaks := getattr(rank.profile, f"{name}_peak_bytes"))
        ]
        if rows:
            tables.append(_table([f"peak {name} memory, MiB", *phases], rows))
    return tables


def _lateness(section: ProfileSection) -> list[str]:
    if not section.lateness:
        return []
    rows = [
        [f"rank {one.rank}", str(one.last), _ms(one.mean_seconds, 1), _ms(one.max_seconds, 1)]
        for one in section.lateness
    ]
    table = _table(["end of backward", "last, times", "behind, ms", "at most"], rows)
    steps = sum(one.last for one in section.lateness)
    if section.late is None:
        return [table, "no rank delayed the others"]
    worst = next(one for one in section.lateness if one.rank == section.late)
    return [
        table,
        f"rank {worst.rank} was late: last in {worst.last} of {steps} steps, "
        f"{_ms(worst.mean_seconds, 1)} ms behind the first rank on average",
    ]


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(aligned([head, *rows]))
