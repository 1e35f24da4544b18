"""The summary of a profile as text tables."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.telemetry.profile_summary import Part, RankTime

_MIB = 1 << 20


def to_text(parts: Sequence[Part]) -> str:
    """Tables for each part: time, phases, memory peaks, lateness, operators."""
    return "\n\n".join("\n\n".join(_sections(part)) for part in parts)


def _sections(part: Part) -> list[str]:
    first, end = part.steps
    count = end - first
    phases = list(part.ranks[0].profile.phases)
    sections = [
        f"steps {first} to {end - 1}, {part.ranks[0].profile.world_size} ranks",
        _table(
            ["time", "ms/step", "compute", "exposed", "other", "overlapped"],
            [[_who(rank), *_shares(rank, count)] for rank in part.ranks],
        ),
        _table(
            ["phase, ms/step", *phases],
            [
                [_who(rank), *(_ms(rank.profile.phases.get(phase, 0.0), count) for phase in phases)]
                for rank in part.ranks
            ],
        ),
        *_memory(part, phases),
        *_lateness(part),
    ]
    if part.operators:
        device = part.ranks[0].profile.device == "cuda"
        rows = [
            [one.name[:70], _ms(one.seconds, count * len(part.ranks)), str(one.calls)]
            for one in part.operators
        ]
        name = "kernel" if device else "operator (own time)"
        sections.append(_table([name, "ms/step and rank", "calls"], rows))
    return sections + [f"note: {problem}" for problem in part.problems]


def _who(rank: RankTime) -> str:
    return f"rank {rank.profile.rank} on {rank.profile.host}"


def _ms(seconds: float, count: int) -> str:
    return f"{seconds / count * 1000:.2f}"


def _shares(rank: RankTime, count: int) -> list[str]:
    wall = rank.profile.wall_seconds
    parts = (rank.compute, rank.exposed, rank.other, rank.overlapped)
    return [_ms(wall, count), *(f"{part / wall:.1%}" for part in parts)]


def _memory(part: Part, phases: list[str]) -> list[str]:
    tables = []
    for name in ("host", "device"):
        rows = [
            [_who(rank), *(f"{peaks[p] / _MIB:.1f}" if p in peaks else "-" for p in phases)]
            for rank in part.ranks
            if (peaks := getattr(rank.profile, f"{name}_peak_bytes"))
        ]
        if rows:
            tables.append(_table([f"peak {name} memory, MiB", *phases], rows))
    return tables


def _lateness(part: Part) -> list[str]:
    if not part.lateness:
        return []
    rows = [
        [f"rank {one.rank}", str(one.last), _ms(one.mean_seconds, 1), _ms(one.max_seconds, 1)]
        for one in part.lateness
    ]
    table = _table(["end of backward", "last, times", "behind, ms", "at most"], rows)
    steps = sum(one.last for one in part.lateness)
    if part.late is None:
        return [table, "no rank held up the others"]
    worst = next(one for one in part.lateness if one.rank == part.late)
    return [
        table,
        f"rank {worst.rank} was late: last in {worst.last} of {steps} steps, "
        f"{_ms(worst.mean_seconds, 1)} ms behind the first rank on average",
    ]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)),
            ]
        )
        for line in lines
    )
