"""The ranks of a run as a table, plain or sized to the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from hvdtrain.runtime.mesh import LABELS, Grid
from hvdtrain.top.scrape import Rank

# Column heads that differ from the phase's name.
_HEADS = {"comm_exposed": "exposed", "optimizer": "optim", "checkpoint": "ckpt"}
# Columns to omit first if the screen is narrow.
_SPARE = (
    "eval",
    "ckpt",
    "other",
    "in",
    "peak",
    "optim",
    "memory",
    "data",
    "forward",
    "backward",
    "step",
)
_GAP = 2
_LONGEST_HOST = 24
_LONGEST_PROBLEM = 60


class View:
    """A snapshot of the ranks; it renders to the current size of the screen.

    Args:
        ranks: in the order of the discovery file.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head, below = header(self._ranks), picture(self._ranks)
        room = max(1, options.size.height - len(head) - 2)  # column heads, omitted ranks
        shown, left_out = fit(self._ranks, room)
        if len(self._ranks) + len(below) > room:
            below = []
        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in (*head, *below)]
        above, after = lines[: len(head)], lines[len(head) :]
        made = table(shown, options.max_width)
        yield Group(*above, made, *after, Text(left_out, style="dim"))


def header(ranks: Sequence[Rank]) -> list[str]:
    """Two lines on the run and, if a model spans ranks, one on its layout."""
    answering = [rank for rank in ranks if not rank.problem]
    first = answering[0] if answering else None
    values = first.values if first is not None else {}
    # Only rank 0 reports restarts.
    restarts = max((rank.values.get("restarts_total", 0.0) for rank in answering), default=0.0)
    slow = [f"rank {rank.target.rank} ({rank.slow})" for rank in answering if rank.slow]
    return [
        f"run {ranks[0].target.run if ranks else '?'}"
        f"   step {_number(values.get('last_step'))}"
        f"   loss {_number(values.get('loss'), '.4f')}"
        f"   world size {_number(values.get('world_size'))}"
        f"   restarts {_number(restarts if first is not None else None)}",
        f"{len(answering)} of {len(ranks)} ranks answer"
        f"   slow: {', '.join(slow[:4]) or 'none'}{' ...' if len(slow) > 4 else ''}",
        *(f"{line}{_bubble(answering)}" for line in _layout(ranks)[:1]),
    ]


def picture(ranks: Sequence[Rank]) -> list[str]:
    """Lines that show each rank's shard, as --print_layout does; [] if all ranks hold the model."""
    return _layout(ranks)[1:]


def _layout(ranks: Sequence[Rank]) -> list[str]:
    if not ranks or not all(rank.target.place for rank in ranks):
        return []
    grid = Grid.at([dict(rank.target.place) for rank in ranks])
    if grid.replica_size == 1:
        return []
    return grid.describe([rank.target.host for rank in ranks]).splitlines()


def _bubble(ranks: Sequence[Rank]) -> str:
    """Share of the time that pipeline ranks waited so far; "" without a pipeline."""
    waited = sum(rank.values.get("pipeline_wait_seconds", 0.0) for rank in ranks)
    whole = sum(rank.values.get("pipeline_schedule_seconds_total", 0.0) for rank in ranks)
    if not whole:
        return ""
    formula = ranks[0].values.get("pipeline_bubble_formula")
    return f"   bubble {waited / whole:.0%} (formula {_number(formula, '.0%')})"


def fit(ranks: Sequence[Rank], room: int) -> tuple[list[Rank], str]:
    """Return (the ranks to show, a note on the others).

    If not all fit, ranks without an answer get at most half of the lines, the slowest the rest.
    """
    if len(ranks) <= room:
        return list(ranks), ""
    silent = [rank for rank in ranks if rank.problem][: (room + 1) // 2]
    answering = sorted((rank for rank in ranks if not rank.problem), key=_score)
    shown = (silent + answering)[:room]
    left = len(ranks) - len(shown)
    return shown, f"the slowest; {left} more ranks do not fit on the screen"


def _score(rank: Rank) -> float:
    return rank.values.get("straggler_score", 1.0)


def table(ranks: Sequence[Rank], width: int | None = None) -> Table:
    """A line for each rank; columns that do not fit into `width` characters are omitted."""
    rows = [_cells(rank) for rank in ranks]
    heads = list(dict.fromkeys(head for row in rows for head in row if head != "problem"))
    sizes = {head: max(len(head), *(len(row.get(head, "")) for row in rows)) for head in heads}
    for spare in (*_SPARE[:5], *LABELS.values(), *_SPARE[5:]):
        if width is None or sum(sizes.values()) + _GAP * len(sizes) <= width:
            break
        sizes.pop(spare, None)
    made = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for head in sizes:
        left = head in ("host", "slow")
        made.add_column(head, justify="left" if left else "right", no_wrap=True)
    for row, rank in zip(rows, ranks, strict=True):
        style = "red" if rank.problem else "yellow" if rank.slow else ""
        made.add_row(*(row.get(head, "-") for head in sizes), style=style)
    return made


def _cells(rank: Rank) -> dict[str, str]:
    """Column head -> text, in the order of the columns."""
    values = rank.values
    memory = values.get("device_memory_bytes") or values.get("host_memory_bytes")
    peak, phase = rank.peak
    shares = {
        f"{_HEADS.get(phase, phase)}": _number(100 * rank.shares[phase], ".0f") + "%"
        if rank.shares
        else "-"
        for phase in rank.phases
    }
    return {
        "rank": rank.target.rank or "?",
        "host": (rank.target.host or rank.target.address)[:_LONGEST_HOST],
        **{LABELS[axis]: str(at) for axis, at in rank.target.place},
        "step": _number(values.get("last_step")),
        "samples/s": _number(values.get("samples_per_second"), ".1f"),
        "dealt": _number(values.get("micro_batches")),
        **shares,
        "score": _number(values.get("straggler_score"), ".2f"),
        "memory": _mebibytes(memory),
        "peak": _mebibytes(peak or None),
        "in": _HEADS.get(phase, phase) or "-",
        "slow": f"no answer: {rank.problem}"[:_LONGEST_PROBLEM] if rank.problem else rank.slow,
    }


def _mebibytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:.0f}M"


def _number(value: float | None, form: str = ".0f") -> str:
    return "-" if value is None else format(value, form)
