"""Step time of a model that two ranks share, compared with torch-only scripts."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.bench.benchmarks import ratios
from hvdtrain.bench.processes import QUIET, launch, measure, on_threads
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.runtime.mesh import key_of_degree
from tests.soak.bench.worker import worker


def layout_speed(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Compare a step of a model that 2 ranks share with torch-only scripts, on the same samples."""
    metrics, apart = [], {}
    for axis in ("shard", "pipeline", "tensor"):
        # Torch's pipeline leaves tied parameters to its user.
        keys = [f"--{key_of_degree(axis)}=2", "--model.tied_embeddings=false"]
        command = worker("layout-speed", steps, [*flags, *QUIET, *keys], rounds)
        result = measure(launch("mpi", 2, on_threads(1, command)))
        own, theirs = result["seconds"]["hvdtrain"], result["seconds"]["torch"]
        metrics += [
            BenchMetric(f"{axis} 2: hvdtrain", "ms/step", [s * 1000 for s in own]),
            BenchMetric(f"{axis} 2: torch", "ms/step", [s * 1000 for s in theirs]),
            BenchMetric(f"{axis} 2: hvdtrain / torch", "x", ratios(own, theirs), at_most=1.05),
        ]
        apart[axis] = f"{result['apart']:.1e}"
    return Report("layout-speed", metrics, {"losses_apart": apart})
