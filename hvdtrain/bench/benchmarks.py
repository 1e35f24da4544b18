"""The benchmarks. All results are ratios of alternating measurements within one run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from hvdtrain.bench.processes import QUIET, measure, worker
from hvdtrain.bench.report import Figure, Report

MIB = 1 << 20


def overhead(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Compare a step of hvdtrain with the plain PyTorch loop, on one rank, in one process."""
    result = measure(worker("overhead", steps, [*flags, *QUIET], rounds))
    own, plain = result["seconds"]["hvdtrain"], result["seconds"]["plain"]
    figures = [
        Figure("hvdtrain", "ms a step", [s * 1000 for s in own]),
        Figure("plain PyTorch loop", "ms a step", [s * 1000 for s in plain]),
        Figure("hvdtrain / plain PyTorch loop", "x", ratios(own, plain), at_most=1.02),
        # These threads run during both loops, so the ratio does not show them.
        Figure("Horovod's threads while idle", "% of a core", [result["idle_share"] * 100]),
    ]
    return Report("overhead", figures, {"bit_identical": result["bit_identical"]})


def memory(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Compare the peak memory of a whole run on one rank with the plain PyTorch loop."""
    own, plain = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as root:
            run = [f"--run.root={root}", f"--train.steps={steps}", QUIET[-1]]
            own.append(measure(worker("memory-hvdtrain", steps, [*flags, *run]))["peak_bytes"])
        plain.append(measure(worker("memory-plain", steps, [*flags, *QUIET]))["peak_bytes"])
    figures = [
        Figure("hvdtrain", "MiB", [value / MIB for value in own]),
        Figure("plain PyTorch loop", "MiB", [value / MIB for value in plain]),
        Figure("hvdtrain / plain PyTorch loop", "x", ratios(own, plain), at_most=1.15),
    ]
    return Report("memory", figures)


def checkpoint(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Compare `steps` steps with a save to the same steps without one, and measure the restore."""
    result = measure(worker("checkpoint", steps, [*flags, *QUIET], rounds))
    saving, without, size = result["saving"], result["not_saving"], result["bytes"]
    stalls = [100 * a / b for a, b in zip(result["stall"], saving, strict=True)]
    figures = [
        Figure("stall of a save", "ms", [s * 1000 for s in result["stall"]]),
        Figure(f"stall, every {steps} steps", "% of the time", stalls, at_most=1.0),
        Figure(f"{steps} steps", "s", without),
        Figure("saving / not saving", "x", ratios(saving, without)),
        Figure("writing, beside the steps", "s", result["write"]),
        Figure("restore", "MB/s", [size / s / 1e6 for s in result["restore"]]),
        Figure("plain reading of the files", "MB/s", [size / s / 1e6 for s in result["read"]]),
        Figure("restore / plain reading", "x", ratios(result["read"], result["restore"])),
    ]
    return Report("checkpoint", figures, {"bytes": size})


def ratios(own: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(own, theirs, strict=True)]
