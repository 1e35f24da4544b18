"""Benchmarks of measured processes: `hvdtrain bench overhead | memory | checkpoint | scaling`.

All results are ratios of alternating measurements within one run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvdtrain.bench.processes import QUIET, choose_hosts, launch, measure, on_threads, worker
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.bench.worker import COPY_EVERY

MIB = 1 << 20
HVDTRAIN = ("horovodrun --gloo", "mpirun")
DDP = "torch DDP"  # on gloo, or on NCCL with GPUs
_NO_EXCHANGE = "no exchange"
_AIM = 90.0  # % of linear scaling


def overhead(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Compare a step of hvdtrain with the plain PyTorch loop, on one rank, in one process."""
    result = measure(worker("overhead", steps, [*flags, *QUIET], rounds))
    own, plain = result["seconds"]["hvdtrain"], result["seconds"]["plain"]
    metrics = [
        BenchMetric("hvdtrain", "ms/step", [s * 1000 for s in own]),
        BenchMetric("plain PyTorch loop", "ms/step", [s * 1000 for s in plain]),
        BenchMetric("hvdtrain / plain PyTorch loop", "x", ratios(own, plain), at_most=1.02),
        # These threads run during both loops, so the ratio does not show them.
        BenchMetric("Horovod's threads while idle", "% of a core", [result["idle_share"] * 100]),
    ]
    return Report("overhead", metrics, {"bit_identical": result["bit_identical"]})


def memory(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Compare the peak memory of a whole run on one rank with the plain PyTorch loop."""
    own, plain = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as root:
            run = [f"--run.root={root}", f"--train.duration={steps}", QUIET[-1]]
            own.append(measure(worker("memory-hvdtrain", steps, [*flags, *run]))["peak_bytes"])
        plain.append(measure(worker("memory-plain", steps, [*flags, *QUIET]))["peak_bytes"])
    metrics = [
        BenchMetric("hvdtrain", "MiB", [value / MIB for value in own]),
        BenchMetric("plain PyTorch loop", "MiB", [value / MIB for value in plain]),
        BenchMetric("hvdtrain / plain PyTorch loop", "x", ratios(own, plain), at_most=1.15),
    ]
    return Report("memory", metrics)


def checkpoint(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Compare steps with saves on disk, or with copies in memory, to steps without them.

    Also measures the restore of a checkpoint.
    """
    result = measure(worker("checkpoint", steps, [*flags, *QUIET], rounds))
    saving, without, size = result["saving"], result["not_saving"], result["bytes"]
    stalls = [100 * a / b for a, b in zip(result["stall"], saving, strict=True)]
    copying, not_copying = result["copying"], result["not_copying"]
    copy_stalls = [
        100 * stall / (COPY_EVERY * seconds / steps)
        for stall, seconds in zip(result["copy_stall"], not_copying, strict=True)
    ]
    metrics = [
        BenchMetric("stall per save", "ms", [s * 1000 for s in result["stall"]]),
        BenchMetric(f"stall, every {steps} steps", "% of the time", stalls, at_most=1.0),
        BenchMetric(f"{steps} steps", "s", without),
        BenchMetric("with a save / without", "x", ratios(saving, without)),
        BenchMetric("write, in the background", "s", result["write"]),
        BenchMetric("restore", "MB/s", [size / s / 1e6 for s in result["restore"]]),
        BenchMetric("plain read of the files", "MB/s", [size / s / 1e6 for s in result["read"]]),
        BenchMetric("restore / plain read", "x", ratios(result["read"], result["restore"])),
        BenchMetric("stall per copy in memory", "ms", [s * 1000 for s in result["copy_stall"]]),
        BenchMetric(f"stall, every {COPY_EVERY} steps", "% of the time", copy_stalls),
        BenchMetric(
            f"copies every {COPY_EVERY} steps / without", "x", ratios(copying, not_copying)
        ),
        BenchMetric("copy sent and verified, in the background", "s", result["copy"]),
    ]
    return Report("checkpoint", metrics, {"bytes": size})


def ratios(own: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(own, theirs, strict=True)]


@dataclass(frozen=True)
class Scale:
    """Range of a scaling benchmark.

    Args:
        ranks: world sizes to measure in addition to 1; each shares the micro-batches evenly.
        hosts: "name:slots,name:slots", of which each size uses the first slots; None: this host.
        global_size: global batch size.
        weak: the batch grows with the world size; else it is split among the ranks.
    """

    ranks: Sequence[int]
    hosts: str | None
    global_size: int
    weak: bool

    def batch_of(self, ranks: int) -> int:
        return self.global_size * (ranks if self.weak else 1)


def scaling(flags: Sequence[str], steps: int, rounds: int, scale: Scale) -> Report:
    """Measure samples per second, with one thread per rank.

    Raises:
        UserError: the hosts have too few slots.
    """
    flags = [*flags, *QUIET]
    own = on_threads(1, worker("rate-hvdtrain", steps, flags))
    contenders = {ranks: _contenders(flags, steps, scale, ranks) for ranks in scale.ranks}
    alone = [_rate(own)]
    rates: dict[int, dict[str, list[float]]] = {
        ranks: {name: [] for name in commands} for ranks, commands in contenders.items()
    }
    for _ in range(rounds):
        for ranks, commands in contenders.items():
            for name, command in commands.items():
                rates[ranks][name].append(_rate(command))
        alone.append(_rate(own))
    # Mean of one rank's throughput before and after a round.
    around = [(a + b) / 2 for a, b in pairwise(alone)]
    metrics = [BenchMetric("1 rank", "samples/s", alone)]
    for ranks, by_name in rates.items():
        metrics += _scaling_metrics(ranks, by_name, around)
    kind = "weak" if scale.weak else "strong"
    return Report("scaling", metrics, {"scaling": kind, "hosts": scale.hosts or "this host"})


def _contenders(flags: Sequence[str], steps: int, scale: Scale, ranks: int) -> dict[str, list[str]]:
    flags = [*flags, f"--batch.global_size={scale.batch_of(ranks)}"]
    hosts = choose_hosts(scale.hosts, ranks) if scale.hosts else None
    kinds = {
        HVDTRAIN[0]: ("gloo", "rate-hvdtrain"),
        HVDTRAIN[1]: ("mpi", "rate-hvdtrain"),
        DDP: ("gloo", "rate-ddp"),
        _NO_EXCHANGE: ("gloo", "rate-apart"),
    }
    return {
        name: launch(launcher, ranks, on_threads(1, worker(kind, steps, flags)), hosts)
        for name, (launcher, kind) in kinds.items()
    }


def _scaling_metrics(
    ranks: int, rates: Mapping[str, Sequence[float]], alone: Sequence[float]
) -> list[BenchMetric]:
    metrics = [BenchMetric(f"{ranks} ranks, {name}", "samples/s", rates[name]) for name in rates]
    for name in rates:
        efficiency = [100 * ratio / ranks for ratio in ratios(rates[name], alone)]
        aim = _AIM if name in HVDTRAIN else None
        metrics.append(BenchMetric(f"{ranks} ranks, {name}: efficiency", "%", efficiency, aim))
    for name in HVDTRAIN:
        of_ddp = ratios(rates[name], rates[DDP])
        metrics.append(BenchMetric(f"{ranks} ranks, {name} / torch DDP", "x", of_ddp, at_least=1.0))
    return metrics


def _rate(command: Sequence[str]) -> float:
    return float(measure(command)["samples_per_second"])
