"""`hvdtrain top`: show the ranks of a run in the terminal until it ends, or once as text."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hvdtrain.errors import EXIT_CRASH, UserError
from hvdtrain.runtime.mesh import LABELS, Grid
from hvdtrain.runtime.signals import leave_on_sigterm
from hvdtrain.top.scrape import Rank, Scraper, read_targets

# Column heads that differ from the phase's name.
_HEADS = {"comm_exposed": "exposed", "optimizer": "optim", "checkpoint": "ckpt"}
# Columns to omit first if the screen is narrow.
_OPTIONAL = (
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
_PLAIN_WIDTH = 1000


class RankTable:
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
    """Two lines on the run; one on lent nodes, and one on its layout, if it has these."""
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
        *_borrowed(answering),
        *(f"{line}{_bubble(answering)}" for line in _layout(ranks)[:1]),
    ]


def _borrowed(ranks: Sequence[Rank]) -> list[str]:
    """Line on the nodes that a batch system lends to the run; [] if it never did. See rank 0."""
    for values in (rank.values for rank in ranks):
        used, idle = (values.get(f"borrowed_{name}_seconds", 0.0) for name in ("used", "idle"))
        if used + idle > 0:
            since = values.get("run_start_timestamp_seconds", 0.0)
            hours = (values.get("last_step_timestamp_seconds", 0.0) - since) / 3600
            changes = values.get("restarts_total", 0.0) / hours if hours > 0 else None
            return [
                f"borrowed nodes {_number(values.get('borrowed_nodes'))}"
                f"   node-seconds used {used:.0f}, idle {idle:.0f}"
                f"   steps lost {_number(values.get('lost_steps_total'))}"
                f"   changes per hour {_number(changes, '.1f')}"
            ]
    return []


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
    return shown, f"the slowest ranks; {left} more do not fit on the screen"


def _score(rank: Rank) -> float:
    return rank.values.get("straggler_score", 1.0)


def table(ranks: Sequence[Rank], width: int | None = None) -> Table:
    """A line for each rank; columns that do not fit into `width` characters are omitted."""
    rows = [_cells(rank) for rank in ranks]
    heads = list(dict.fromkeys(head for row in rows for head in row if head != "problem"))
    sizes = {head: max(len(head), *(len(row.get(head, "")) for row in rows)) for head in heads}
    for spare in (*_OPTIONAL[:5], *LABELS.values(), *_OPTIONAL[5:]):
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
        "batches": _number(values.get("micro_batches")),
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


def once(file: Path, scraper: Scraper, interval: float) -> int:
    """Print a plain table of the ranks' activity within an interval.

    Returns:
        The exit code: 1 if no rank answers.

    Raises:
        UserError: there is no such file, or it does not belong to a run.
    """
    try:
        targets = read_targets(file)
        scraper.ranks(targets)
        time.sleep(interval)
        ranks = scraper.ranks(targets)
    except FileNotFoundError:
        raise _not_there(file) from None
    finally:
        scraper.close()
    console = Console(width=_PLAIN_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(*header(ranks), sep="\n", markup=False, highlight=False)
        console.print(table(ranks))
        for line in picture(ranks):
            console.print(line, markup=False, highlight=False)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is not an error
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    return 0 if any(not rank.problem for rank in ranks) else EXIT_CRASH


def live(file: Path, scraper: Scraper, interval: float) -> int:
    """Show the ranks until the run ends or the user presses Ctrl-C.

    Raises:
        UserError: there is no such file, it does not belong to a run, or this is not a terminal.
        KeyboardInterrupt: Ctrl-C; the terminal is restored.
    """
    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        raise UserError("standard output is not a terminal with cursor control; use --once")
    try:
        read_targets(file)
    except FileNotFoundError:
        raise _not_there(file) from None
    news: SimpleQueue[list[Rank] | Exception | None] = SimpleQueue()  # None: redraw
    ending = Event()
    watcher = Thread(target=_watch, args=(file, scraper, interval, news, ending), daemon=True)
    signal.signal(signal.SIGWINCH, lambda *_: news.put(None))
    leave_on_sigterm()
    view: RankTable | Text = Text("querying the ranks ...")
    try:
        with Live(view, console=console, screen=True, auto_refresh=False) as screen:
            watcher.start()
            while (item := news.get()) != []:
                if isinstance(item, Exception):
                    raise item
                view = view if item is None else RankTable(item)
                screen.update(view, refresh=True)
    finally:
        ending.set()
        scraper.close()
    print(f"hvdtrain: the run has ended ({file} was removed)")
    return 0


def _watch(
    file: Path,
    scraper: Scraper,
    interval: float,
    news: SimpleQueue[list[Rank] | Exception | None],
    ending: Event,
) -> None:
    """Put the ranks' answers into `news` every interval; [] when the file is gone."""
    while not ending.is_set():
        begin = time.monotonic()
        try:
            news.put(scraper.ranks(read_targets(file)))
        except FileNotFoundError:
            news.put([])
            return
        except Exception as error:
            # The drawing thread reports it after restoring the terminal, but not after the end.
            news.put(error)
            return
        ending.wait(max(0.0, interval - (time.monotonic() - begin)))


def _not_there(file: Path) -> UserError:
    return UserError(
        f"{file} does not exist; it exists while a run with telemetry.port other than 0 trains"
    )
