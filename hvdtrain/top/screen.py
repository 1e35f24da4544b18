"""`hvdtrain top`: show the ranks of a run in the terminal until it ends, or once as text."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hvdtrain.errors import EXIT_CRASH, UserError
from hvdtrain.runtime.signals import leave_on_sigterm
from hvdtrain.top.scrape import Rank, Scraper, read_targets
from hvdtrain.top.table import View, header, picture, table

_PLAIN_WIDTH = 1000


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
        raise UserError("standard output is no terminal that could be drawn on; use --once")
    try:
        read_targets(file)
    except FileNotFoundError:
        raise _not_there(file) from None
    news: SimpleQueue[list[Rank] | Exception | None] = SimpleQueue()  # None: redraw
    ending = Event()
    watcher = Thread(target=_watch, args=(file, scraper, interval, news, ending), daemon=True)
    signal.signal(signal.SIGWINCH, lambda *_: news.put(None))
    leave_on_sigterm()
    view: View | Text = Text("asking the ranks ...")
    try:
        with Live(view, console=console, screen=True, auto_refresh=False) as screen:
            watcher.start()
            while (item := news.get()) != []:
                if isinstance(item, Exception):
                    raise item
                view = view if item is None else View(item)
                screen.update(view, refresh=True)
    finally:
        ending.set()
        scraper.close()
    print(f"hvdtrain: {file} is gone: the run has ended")
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
        f"{file}: there is no such file; it is there while a run trains whose telemetry.port is "
        "not 0"
    )
