"""Cost of telemetry for a step, and of a scrape for a rank."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from hvdtrain.bench.benchmarks import ratios
from hvdtrain.bench.jobs import ControlledJob, median_range, seconds_per_step, train
from hvdtrain.bench.processes import QUIET, launch, measure
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.launch.commands import horovodrun
from tests.soak.bench.scraper import read
from tests.soak.bench.worker import worker

_RANKS = 2
_ON = ("--telemetry.port=9855", "--telemetry.host=127.0.0.1")
_WARM_UP_STEPS = 15
_SCRAPE_EVERY_S = 1.0


def telemetry(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Alternate steps with all telemetry and without it, in a job on 2 ranks of this host.

    The phases are timed in both; what is switched off and on again, inside one job, are the
    exporter and the exchange between the ranks.
    """
    command = worker("telemetry", steps, [*flags, *QUIET], rounds)
    seconds = measure(launch("gloo", _RANKS, command))["seconds"]
    found = ratios(seconds["with"], seconds["without"])
    metrics = [
        BenchMetric("with telemetry", "ms/step", [s * 1000 for s in seconds["with"]]),
        BenchMetric("without", "ms/step", [s * 1000 for s in seconds["without"]]),
        BenchMetric("with / without", "x", found, at_most=1.01),
    ]
    return Report("telemetry", metrics, _range(found))


def scrape(flags: Sequence[str], steps: int, rounds: int, np: int) -> Report:
    """Compare steps of a job while its ranks are scraped every second and while they are not.

    Also measures the CPU time of a rank for one scrape, over all threads.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        _job(np, [*flags, *_ON], Path(directory)) as job,
    ):
        job.wait_for_more(_WARM_UP_STEPS)
        scraped, left = [], []
        for turn in range(rounds):
            for scraping in sorted(
                (True, False), reverse=turn % 2 == 1
            ):  # alternate which one begins
                if scraping:
                    with _scraping(job.targets):
                        scraped.append(seconds_per_step(job, steps))
                else:
                    left.append(seconds_per_step(job, steps))
    found = ratios(scraped, left)
    cost = measure(worker("scrape", 1, [*flags, *QUIET], rounds))
    metrics = [
        BenchMetric("scraped every second", "ms/step", [s * 1000 for s in scraped]),
        BenchMetric("not scraped", "ms/step", [s * 1000 for s in left]),
        BenchMetric("scraped / not scraped", "x", found, at_most=1.01),
        BenchMetric(
            "one scrape", "ms of CPU time", [s * 1000 for s in cost["seconds"]], at_most=1.0
        ),
    ]
    return Report("scrape", metrics, {"ranks": np, **_range(found)})


def _job(np: int, flags: Sequence[str], root: Path) -> ControlledJob:
    return ControlledJob(horovodrun(np, train(sys.executable, flags, root)), root, patient=True)


def _range(values: Sequence[float]) -> dict[str, str]:
    low, high = median_range(values)
    return {"median_of_the_ratio": f"{low:.4f} to {high:.4f} (95 %)"}


@contextmanager
def _scraping(targets: Path) -> Iterator[None]:
    """Scrape each rank once per second inside the context, evenly spread, as Prometheus does."""
    addresses = [entry["targets"][0] for entry in json.loads(targets.read_text())]
    addresses = [f"127.0.0.1:{address.rpartition(':')[2]}" for address in addresses]
    stop = Event()

    def scrape_all() -> None:
        for number in range(sys.maxsize):
            if stop.wait(_SCRAPE_EVERY_S / len(addresses)):
                return
            read(addresses[number % len(addresses)])

    thread = Thread(target=scrape_all, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=10)
