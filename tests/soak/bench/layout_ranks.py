"""Ranks of layouts.py: one layout after the other, in one start.

`python -m tests.soak.bench.layout_ranks STEPS FLAGS...`, each FLAGS a list as JSON. Rank 0 prints a
line of JSON that begins with MARK after each layout; the first that fails ends the ranks.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.bench.app import AppLoop
from hvdtrain.bench.processes import MARK
from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.run_files.events_file import read_lines
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime import environment
from hvdtrain.runtime.collectives import AgreedError
from hvdtrain.runtime.init import initialize
from hvdtrain.runtime.mesh import Topology

_EVALUATIONS = ("validation_loss", "ema_validation_loss")


def main(steps: str, *of_layouts: str) -> int:
    environment.prepare(process_sets=True)
    topology = initialize()
    for flags in of_layouts:
        try:
            curve = _curve(json.loads(flags), int(steps), topology)
        except (UserError, AgreedError) as error:  # of all ranks
            if topology.rank == 0:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return 1
        if topology.rank == 0:
            print(MARK + json.dumps(curve) + "}", flush=True)
    return 0


def _curve(flags: Sequence[str], steps: int, topology: Topology) -> dict[str, list[float]]:
    """See layouts_report.Curve; on rank 0."""
    settings = parse(flags)
    with tempfile.TemporaryDirectory() as directory:
        app = AppLoop(settings, Path(directory), topology=topology)
        try:
            app.run(steps)
        finally:
            app.close()
        lines = (
            list(read_lines(RunDirectory(Path(directory)).metrics)) if topology.rank == 0 else []
        )
    return {
        "losses": [line["loss"] for line in lines],
        "norms": [line["grad_norm"] for line in lines],
        "validation": [line[name] for line in lines for name in _EVALUATIONS if name in line],
        "seconds": [line["step_seconds"] for line in lines],
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
