"""`make plan-check`: predicted and measured steps, on two hosts of one core each; requires root.

Inputs of the predictions: measurements of the job by `hvdtrain plan --measure` with as many
processes as a host has ranks (before and after the cells of a number of ranks, because the machine
drifts), all-reduces of the ranks without a limit, and the limits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench.processes import MARK, QUIET, launch
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.plan.cluster import Cluster, Link
from hvdtrain.plan.job import JobProfile
from hvdtrain.plan.measure import COLLECTIVES, CollectiveCosts, costs_from, job_from, mean_of
from hvdtrain.plan.predict import predict
from tests.soak.pinned import NAMES, PinnedHosts
from tests.support.namespaces import why_not

# tbf counts an Ethernet frame without preamble, checksum and gap.
PAYLOAD = 1448 / 1514
LOOPBACK = Link(40e9)
LIMIT_S = 900.0
AIM = 0.10


@dataclass(frozen=True)
class Cell:
    """A measured step and its prediction.

    Args:
        mbit, ranks, strategy: the configuration.
        measured, predicted: seconds per step.
    """

    mbit: int
    ranks: int
    strategy: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if reason := why_not():
        print(f"plan-check: {reason}", file=sys.stderr)
        return 2
    flags = ["--config", "gpt-nano", "--batch.global_size=8", "--batch.micro_size=2", *QUIET]
    cells: list[Cell] = []
    with PinnedHosts() as hosts:
        flags.append(f"--run.root={hosts.shared}/runs")
        for ranks in args.ranks:
            cells += _cells(hosts, flags, ranks, args)
    _show(cells)
    if args.out:
        args.out.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    return 0 if max(abs(cell.ratio - 1) for cell in cells) <= AIM else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    parser.add_argument("--mbit", default=[100, 200, 400, 1000], **numbers)
    parser.add_argument("--ranks", default=[1, 2, 4], **numbers)
    parser.add_argument(
        "--strategies", default=["dense", "float16", "powersgd"], type=lambda text: text.split(",")
    )
    parser.add_argument("--steps", type=int, default=8, help="of a turn; a cell has five")
    parser.add_argument("--out", type=Path, help="JSON of all cells")
    return parser


def _cells(
    hosts: PinnedHosts, flags: Sequence[str], ranks: int, args: argparse.Namespace
) -> list[Cell]:
    used = min(ranks, len(NAMES))
    per_host = ranks // used
    where = ",".join(f"{name}:{per_host}" for name in NAMES[:used])
    costs = _costs(hosts, ranks, where) if ranks > 1 else CollectiveCosts(0.0, 0.0, 0.0)
    wanted = [(mbit, strategy) for mbit in args.mbit for strategy in args.strategies]
    text = json.dumps({"flags": flags, "cells": wanted})
    command = [sys.executable, "-m", "tests.soak.plan_cells", str(args.steps), text]
    if ranks > 1:
        command = launch("gloo", ranks, command, where)
    before = _job(hosts, flags, per_host)
    measured = _measured(hosts, "node1", command)
    hosts.limit(None)
    job = mean_of([before, _job(hosts, flags, per_host)])
    config = ExchangeConfig()
    found = []
    for (mbit, strategy), seconds in zip(wanted, measured, strict=True):
        cluster = Cluster(
            hosts=used,
            ranks_per_host=per_host,
            between=Link(mbit * 1e6, payload=PAYLOAD),
            within=LOOPBACK,
            launch_seconds=costs.launch_seconds,
            busy_seconds_per_byte=costs.busy_seconds_per_byte,
            contention_seconds=costs.contention_seconds,
        )
        predicted = predict(job, cluster, strategy, config).step_seconds
        found.append(Cell(mbit, ranks, strategy, seconds, predicted))
    return found


def _job(hosts: PinnedHosts, flags: Sequence[str], at_once: int) -> JobProfile:
    command = [sys.executable, "-m", "hvdtrain.plan.worker", *flags]
    with ThreadPoolExecutor(at_once) as pool:
        jobs = pool.map(lambda _: _measured(hosts, "node1", command), range(at_once))
        return mean_of([job_from(job) for job in jobs])


def _costs(hosts: PinnedHosts, ranks: int, where: str) -> CollectiveCosts:
    idle, computing = (
        _line(hosts, "node1", launch("gloo", ranks, command, where))["seconds"]
        for command in COLLECTIVES
    )
    return costs_from(idle, computing, ranks)


def _measured(hosts: PinnedHosts, host: str, command: Sequence[str]) -> Any:
    return _line(hosts, host, command)["measured"]


def _line(hosts: PinnedHosts, host: str, command: Sequence[str]) -> dict[str, Any]:
    done = hosts.run(host, command, LIMIT_S)
    for line in [*done.stdout.splitlines(), *done.stderr.splitlines()]:
        if MARK in line:  # horovodrun prefixes the rank
            found: dict[str, Any] = json.loads(line[line.index(MARK) :])
            return found
    raise SystemExit(f"{' '.join(command)}: {done}")


def _show(cells: Sequence[Cell]) -> None:
    print("| Mbit/s | ranks | exchange | measured ms | predicted ms | predicted / measured |")
    print("| --- | --- | --- | --- | --- | --- |")
    for cell in cells:
        both = f"{cell.measured * 1e3:.1f} | {cell.predicted * 1e3:.1f}"
        print(f"| {cell.mbit} | {cell.ranks} | {cell.strategy} | {both} | {cell.ratio:.3f} |")
    worst = max(cells, key=lambda cell: abs(cell.ratio - 1))
    within = sum(abs(cell.ratio - 1) <= AIM for cell in cells)
    name = f"{worst.mbit} Mbit/s, {worst.ranks} ranks, {worst.strategy}"
    print(f"\nworst: {worst.ratio - 1:+.1%} ({name}); {within} of {len(cells)} within {AIM:.0%}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
