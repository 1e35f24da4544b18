"""Ranks that measure steps at several bandwidths: `python -m tests.soak.plan_cells STEPS JSON`.

JSON: {"flags": [...], "cells": [[Mbit/s, strategy], ...]}. The first rank of each host limits the
bandwidth of its eth0. All cells take turns, so that drift of the machine affects all of them. Rank
0 prints a line of JSON that begins with MARK: seconds per step of each cell, medians of the turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from hvdtrain.bench.app import AppLoop
from hvdtrain.bench.processes import MARK
from hvdtrain.config import parse
from hvdtrain.exchange.config import STRATEGIES
from hvdtrain.process.data import build_data
from hvdtrain.runtime import environment
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.init import initialize
from hvdtrain.runtime.mesh import Topology

WARM_UP_STEPS = 2
TURNS = 5


def main(steps: str, text: str) -> int:
    given = json.loads(text)
    environment.prepare()
    topology = initialize()
    data = build_data(parse(given["flags"]))
    cells = given["cells"]
    seconds: list[list[float]] = [[] for _ in cells]
    for turn in range(TURNS):
        for number, (mbit, strategy) in enumerate(cells):
            if topology.local_rank == 0:
                _shape(mbit)
            gather_json(0, f"shaped.{turn}.{number}")
            keys = [f"--exchange.{k}={v}" for k, v in STRATEGIES[strategy].items()]
            flags = [*given["flags"], *keys, "--exchange.start_step=0", "--train.duration=1000000"]
            seconds[number].append(_turn(flags, int(steps), topology, data))
    if topology.rank == 0:
        print(MARK + json.dumps([median(turns) for turns in seconds]) + "}", flush=True)
    return 0


def _shape(mbit: int) -> None:
    limit = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms"]
    command = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit]
    subprocess.run(command, check=True, timeout=20)


def _turn(flags: Sequence[str], steps: int, topology: Topology, data: object) -> float:
    with tempfile.TemporaryDirectory() as directory:
        app = AppLoop(parse(flags), Path(directory), data, topology)  # type: ignore[arg-type]
        try:
            app.run(WARM_UP_STEPS)
            return app.run(steps) / steps
        finally:
            app.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
