"""Like hvdtrain/bench/worker.py, for these benchmarks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.bench import worker as of_package
from hvdtrain.bench.worker import IDLE_SECONDS, WARM_UP_STEPS
from hvdtrain.config import Settings
from tests.soak.bench import scraper

SCRAPES = 50


def worker(kind: str, steps: int, flags: Sequence[str], rounds: int) -> list[str]:
    """Return the command line of a measured process."""
    return [sys.executable, "-m", "tests.soak.bench.worker", kind, str(steps), str(rounds), *flags]


def _scrape(settings: Settings, _: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Measure this process's CPU seconds for one scrape by another process."""
    from hvdtrain.bench.app import AppLoop

    settings.config.train.duration = WARM_UP_STEPS
    app = AppLoop(settings, directory)
    app.run(WARM_UP_STEPS)
    address = f"127.0.0.1:{app.exporter.port}" if app.exporter else ""
    command = [sys.executable, "-m", scraper.__name__, address, str(SCRAPES)]
    start = time.process_time()
    time.sleep(IDLE_SECONDS)
    idle = (time.process_time() - start) / IDLE_SECONDS
    seconds = []
    for _ in range(rounds):
        start, began = time.process_time(), time.perf_counter()
        subprocess.run(command, check=True, timeout=60)
        used = time.process_time() - start - idle * (time.perf_counter() - began)
        seconds.append(used / SCRAPES)
    return {"seconds": seconds}


def _telemetry(settings: Settings, steps: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Measure step times with and without telemetry, in alternating blocks of one job."""
    from hvdtrain.bench.app import AppLoop
    from hvdtrain.engine.callbacks.log import Export
    from hvdtrain.engine.callbacks.stragglers import DetectStragglers

    settings.config.train.duration = WARM_UP_STEPS + 2 * rounds * steps + 1  # it never ends
    app = AppLoop(settings, directory)
    app.run(WARM_UP_STEPS)
    callbacks = {"with": app.every_callback}
    callbacks["without"] = [
        one for one in app.every_callback if not isinstance(one, (Export, DetectStragglers))
    ]
    seconds: dict[str, list[float]] = {name: [] for name in callbacks}
    for turn in range(rounds):
        for name in sorted(seconds, reverse=turn % 2 == 1):  # alternate which one begins
            app.every_callback = callbacks[name]
            seconds[name].append(app.run(steps) / steps)
    return {"seconds": seconds} if app.rank == 0 else {}


def _layout_speed(settings: Settings, steps: int, rounds: int, directory: Path) -> dict[str, Any]:
    from tests.soak.bench.layout_speed_ranks import take_turns

    return take_turns(settings, steps, rounds, directory)


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "scrape": _scrape,
    "telemetry": _telemetry,
    "layout-speed": _layout_speed,
}

if __name__ == "__main__":
    of_package.KINDS.update(KINDS)
    sys.exit(of_package.main(sys.argv[1:]))
