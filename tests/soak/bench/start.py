"""Time from a command to the end of its fourth step: two launchers of hvdtrain, and torchrun."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.bench.jobs import ControlledJob, train
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.launch.commands import horovodrun, mpirun
from tests.soak.bench import start_ddp

_RANKS = 2
_STEPS = 4


def start(flags: Sequence[str], rounds: int) -> Report:
    """Start each of three jobs on 2 ranks of this host `rounds` times, in turns.

    A round before the first one, which fills the page cache, does not count.

    Raises:
        BenchError: a job failed.
    """
    seconds: dict[str, list[float]] = {"torchrun": [], "mpirun": [], "horovodrun": []}
    for turn in range(-1, rounds):
        for name in sorted(seconds, reverse=turn % 2 == 1):
            took = _one_start(name, flags)
            if turn >= 0:
                seconds[name].append(took)
    metrics = [BenchMetric(name, "s", values) for name, values in seconds.items()]
    for name in ("mpirun", "horovodrun"):
        pairs = zip(seconds[name], seconds["torchrun"], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        metrics.append(BenchMetric(f"{name} / torchrun", "x", ratios, at_most=0.7))
    return Report("start", metrics, {"steps": _STEPS})


def _one_start(name: str, flags: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        if name == "torchrun":
            (root / "bench").mkdir()
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            script = [start_ddp.__file__, str(root / "bench/metrics.jsonl")]
            argv = [*torchrun, f"--nproc-per-node={_RANKS}", *script]
        else:
            command = train(sys.executable, [*flags, "--runtime.threads=1"], root)
            argv = {"mpirun": mpirun, "horovodrun": horovodrun}[name](_RANKS, command)
        begin = time.monotonic()
        with ControlledJob(argv, root) as job:
            job.wait_for_more(_STEPS)
            return time.monotonic() - begin
