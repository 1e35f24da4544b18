"""Cost of copies of shards in memory: one run of 4 ranks on 2 hosts, with a copy every 5 steps.

A copy is taken at the end of a step and sent during the next one, so these two steps of a cycle of
five are compared with the other three.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from hvdtrain.bench.processes import BenchError
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.launch.commands import elastic_horovodrun
from tests.soak.pinned import PinnedHosts

EVERY = 5
_WARM_UP_CYCLES = 1
_LIMIT_S = 3000.0


def copies(flags: Sequence[str], rounds: int) -> Report:
    """Measure `rounds` cycles of five steps of a model whose shards are on 4 ranks.

    Raises:
        BenchError: the run failed.
    """
    steps = (_WARM_UP_CYCLES + rounds) * EVERY + 1
    with PinnedHosts() as hosts:
        root = hosts.shared / "runs"
        train = [
            *(sys.executable, "-m", "hvdtrain.train", *flags, "--parallel.shard.degree=4"),
            *(f"--checkpoint.memory.every={EVERY}", "--checkpoint.every=0", "--eval.every=0"),
            *("--runtime.threads=1", "--telemetry.port=0", f"--train.duration={steps}"),
            *(f"--run.root={root}", "--run.id=copies"),
        ]
        discovery = ["echo", "node1:2\nnode2:2"]
        done = hosts.run("node1", elastic_horovodrun(4, 4, 4, discovery, train), _LIMIT_S)
        if done.returncode:
            raise BenchError(str(done))
        lines = [json.loads(line) for line in (root / "copies/metrics.jsonl").open()]
        shutil.rmtree(root)
    seconds = {line["step"]: line["time"] - before["time"] for before, line in pairwise(lines)}
    first = [EVERY * cycle for cycle in range(_WARM_UP_CYCLES, steps // EVERY)]
    costs, worst, plain = [], [], []
    for step in first:  # `step` takes the copy, the step after it sends it
        others = median(seconds[step + n] for n in range(2, EVERY))
        plain.append(others)
        costs.append(100 * (seconds[step] + seconds[step + 1] - 2 * others) / (EVERY * others))
        worst.append(max(seconds[step], seconds[step + 1]) / others - 1)
    metrics = [
        BenchMetric("steps without a copy", "s", plain),
        BenchMetric(f"a copy every {EVERY} steps", "% of the steps", costs, at_most=2.0),
        BenchMetric("longest stall", "steps", worst, at_most=1.0),
    ]
    return Report("copies", metrics, {"cycles": len(first)})
