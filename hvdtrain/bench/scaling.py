"""Throughput of several ranks compared with one rank and with torch's DDP on the same hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvdtrain.bench.benchmarks import ratios
from hvdtrain.bench.processes import QUIET, choose_hosts, launch, measure, on_threads, worker
from hvdtrain.bench.report import Figure, Report

OWN = ("horovodrun --gloo", "mpirun")
DDP = "torch DDP on gloo"
_NO_EXCHANGE = "no exchange"
_AIM = 90.0  # % of linear scaling


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
    figures = [Figure("1 rank", "samples/s", alone)]
    for ranks, by_name in rates.items():
        figures += _figures(ranks, by_name, around)
    kind = "weak" if scale.weak else "strong"
    return Report("scaling", figures, {"scaling": kind, "hosts": scale.hosts or "this one"})


def _contenders(flags: Sequence[str], steps: int, scale: Scale, ranks: int) -> dict[str, list[str]]:
    flags = [*flags, f"--batch.global_size={scale.batch_of(ranks)}"]
    hosts = choose_hosts(scale.hosts, ranks) if scale.hosts else None
    kinds = {
        OWN[0]: ("gloo", "rate-hvdtrain"),
        OWN[1]: ("mpi", "rate-hvdtrain"),
        DDP: ("gloo", "rate-ddp"),
        _NO_EXCHANGE: ("gloo", "rate-apart"),
    }
    return {
        name: launch(launcher, ranks, on_threads(1, worker(kind, steps, flags)), hosts)
        for name, (launcher, kind) in kinds.items()
    }


def _figures(
    ranks: int, rates: Mapping[str, Sequence[float]], alone: Sequence[float]
) -> list[Figure]:
    figures = [Figure(f"{ranks} ranks, {name}", "samples/s", rates[name]) for name in rates]
    for name in rates:
        efficiency = [100 * ratio / ranks for ratio in ratios(rates[name], alone)]
        aim = _AIM if name in OWN else None
        figures.append(Figure(f"{ranks} ranks, {name}: efficiency", "%", efficiency, aim))
    for name in OWN:
        of_ddp = ratios(rates[name], rates[DDP])
        figures.append(Figure(f"{ranks} ranks, {name} / torch DDP", "x", of_ddp, at_least=1.0))
    return figures


def _rate(command: Sequence[str]) -> float:
    return float(measure(command)["samples_per_second"])
