"""`hvdtrain bench exchange`: step time and loss of gradient exchange strategies in real runs."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hvdtrain.bench.jobs import RANK
from hvdtrain.bench.processes import LIMIT_S, QUIET, finish, launch, measure, on_threads, worker
from hvdtrain.bench.report import load, machine
from hvdtrain.config import Config, parse
from hvdtrain.errors import UserError
from hvdtrain.exchange.config import STRATEGIES, ExchangeConfig
from hvdtrain.launch import mpi
from hvdtrain.run_files.events_file import read_lines
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.text import aligned

NO_EXCHANGE = "no exchange"
DENSE = "dense"
# Steps excluded from time and bytes: powersgd begins after this number of steps.
WARM_UP_STEPS = 10
_LEAST_STEPS = 2 * WARM_UP_STEPS
_SECONDS_PER_STEP = 30.0  # limit for a run, in addition to LIMIT_S
_SMOOTHED = 10  # steps over which the training loss is averaged


@dataclass(frozen=True)
class RankPlacement:
    """Number and placement of the ranks of a run.

    Args:
        np: ranks.
        hosts: "name:slots,name:slots" with `np` slots; None: this host.
        launcher: gloo (horovodrun) or mpi (mpirun).
    """

    np: int
    hosts: str | None
    launcher: str


def parse_strategies(text: str) -> list[str]:
    """Parse names of STRATEGIES, each once.

    Raises:
        UserError: a name is unknown.
    """
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in STRATEGIES:
            raise UserError(
                f"--strategies: unknown strategy {name!r}; choose from {', '.join(STRATEGIES)}"
            )
    return list(dict.fromkeys(names))


def check_steps(steps: int) -> None:
    """Raise UserError if a run of `steps` steps is too short to be measured."""
    if steps < _LEAST_STEPS:
        raise UserError(
            f"--steps {steps}: the first {WARM_UP_STEPS} steps are excluded from time and "
            f"bytes, so at least {_LEAST_STEPS} are required"
        )


def exchange(
    flags: Sequence[str], strategies: Sequence[str], steps: int, rounds: int, ranks: RankPlacement
) -> ExchangeReport:
    """Run `steps` steps with each strategy, and ranks that train alone, in turns.

    Every rank computes with `runtime.threads`, or with one thread.

    Args:
        flags: flags of the runs; `run.root` is a directory that all hosts share.
        steps: as required by `check_steps`.

    Raises:
        UserError: the flags exclude a strategy, or nothing can be started.
        BenchError: a run failed.
    """
    config = parse(flags).config
    _check(config, ranks)
    root = _made(Path(config.run.root).absolute())
    threads = config.runtime.threads or 1
    flags = [*flags, *QUIET, f"--runtime.threads={threads}"]
    with_strategy = {name: [*flags, *_flags_of(name)] for name in strategies}
    for own in with_strategy.values():
        parse(own)  # all must be valid before the first one runs for minutes
    apart = worker("rate-apart", steps - WARM_UP_STEPS, flags)
    alone_command = launch("gloo", ranks.np, on_threads(threads, apart), ranks.hosts)
    curves: dict[str, list[Curve]] = {name: [] for name in strategies}
    alone: list[float] = []
    sides = [NO_EXCHANGE, *strategies]
    for number in range(rounds):
        for side in sides[:: -1 if number % 2 else 1]:  # alternate the order
            if side == NO_EXCHANGE:
                rate = measure(alone_command)["samples_per_second"]
                alone.append(config.batch.global_size / rate)
            else:
                curves[side].append(_run(with_strategy[side], steps, ranks, root))
    facts = {
        "ranks": ranks.np,
        "hosts": ranks.hosts or f"localhost:{ranks.np}",
        "launcher": ranks.launcher,
        "rounds": rounds,
    }
    return ExchangeReport(facts, curves, alone)


def read_curve(directory: RunDirectory) -> Curve:
    """Read the files of a run that did more than WARM_UP_STEPS and was evaluated at its end."""
    lines, exchanges = list(read_lines(directory.metrics)), list(read_lines(directory.ranks))
    begin = lines[0]["time"] - lines[0]["step_seconds"]
    counted = [line for line in exchanges if line["step"] > WARM_UP_STEPS]
    sent = sum(sum(line["bytes"]) / len(line["bytes"]) for line in counted)
    return Curve(
        [line["time"] - begin for line in lines],
        [_finite(line["loss"]) for line in lines],
        sent / sum(line["steps"] for line in counted),
        _finite(lines[-1]["validation_loss"]),
    )


def _check(config: Config, ranks: RankPlacement) -> None:
    for key, default in _defaults().items():
        value = getattr(config.exchange, key)
        if value != default:
            raise UserError(
                f"exchange.{key} {value}: the strategies set this key; omit it and choose "
                "with --strategies"
            )
    if ranks.launcher == "mpi" and (problem := mpi.problem()):
        raise UserError(f"--launcher mpi: {problem}")


def _made(root: Path) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=root).cleanup()
    except OSError as error:
        raise UserError(f"run.root {root} cannot be written: {error.strerror}") from None
    return root


def _defaults() -> dict[str, Any]:
    """Defaults of the keys that any strategy sets."""
    keys = dict.fromkeys(key for own in STRATEGIES.values() for key in own)
    return {key: getattr(ExchangeConfig(), key) for key in keys}


def _flags_of(strategy: str) -> list[str]:
    own = {**_defaults(), **STRATEGIES[strategy]}
    return [f"--exchange.{key}={value}" for key, value in own.items()]


def _run(flags: Sequence[str], steps: int, ranks: RankPlacement, root: Path) -> Curve:
    with tempfile.TemporaryDirectory(dir=root) as path:
        own = [
            *(f"--run.root={path}", "--run.id=bench", "--run.resume=auto"),
            *(f"--train.duration={steps}", "--train.log_every=1"),
            *(f"--eval.every={steps}", f"--telemetry.exchange_every={WARM_UP_STEPS}"),
        ]
        command = [sys.executable, *RANK, *flags, *own]
        limit = LIMIT_S + steps * _SECONDS_PER_STEP
        finish(launch(ranks.launcher, ranks.np, command, ranks.hosts), limit=limit)
        return read_curve(RunDirectory(Path(path, "bench")))


def _finite(value: float | None) -> float:
    """Return nan for null, which metrics.jsonl has for non-finite values."""
    return math.nan if value is None else value


@dataclass(frozen=True)
class Curve:
    """A run with one strategy.

    Args:
        seconds: time at the end of each step, from the beginning of the first step.
        losses: training loss of each step; nan if it was not finite.
        sent: gradient bytes that a rank passed to collectives per step, in the wire format.
        validation_loss: after the last step.
    """

    seconds: Sequence[float]
    losses: Sequence[float]
    sent: float
    validation_loss: float

    @property
    def step_seconds(self) -> float:
        """Seconds per step, over all steps after the first WARM_UP_STEPS.

        It is not the median, because a strategy may exchange only every few steps.
        """
        timed = len(self.seconds) - WARM_UP_STEPS
        return (self.seconds[-1] - self.seconds[WARM_UP_STEPS - 1]) / timed

    def loss_after(self, steps: int) -> float:
        """Mean training loss of the last 10 of the first `steps` steps; nan for 0."""
        last = self.losses[max(0, steps - _SMOOTHED) : steps]
        return fmean(last) if last else math.nan

    def loss_at(self, seconds: float) -> float:
        """`loss_after` the steps completed within `seconds`; nothing is interpolated."""
        return self.loss_after(bisect_right(self.seconds, seconds))

    def smoothed(self) -> list[tuple[float, float]]:
        """(seconds, `loss_after`) of each step."""
        return [(at, self.loss_after(step)) for step, at in enumerate(self.seconds, start=1)]


@dataclass(frozen=True)
class ExchangeReport:
    """Results of the measurement.

    Args:
        facts: ranks, hosts, launcher and similar facts, as printed.
        curves: curves of each strategy, one per round.
        alone: seconds per step of ranks that exchange nothing, one per round.
    """

    facts: Mapping[str, Any]
    curves: Mapping[str, Sequence[Curve]]
    alone: Sequence[float]

    @property
    def steps(self) -> int:
        return len(next(iter(self.curves.values()))[0].losses)

    def equal_seconds(self) -> list[float]:
        """For each round, the time at which its fastest strategy had done all steps."""
        rounds = zip(*self.curves.values(), strict=True)
        return [min(curve.seconds[-1] for curve in curves) for curves in rounds]

    def rows(self) -> list[dict[str, Any]]:
        """One row per side; medians over the rounds, None for values that a side does not have.

        `of` contains ratios of step times from the same round.
        """
        return [self._row(side) for side in (NO_EXCHANGE, *self.curves)]

    def to_json(self) -> str:
        content = {
            "benchmark": "exchange",
            **self.facts,
            "steps": self.steps,
            "equal_seconds": median(self.equal_seconds()),
            "machine": machine(),
            "rows": self.rows(),
        }
        return json.dumps(content, indent=1)

    def to_table(self) -> str:
        references = [side for side in (NO_EXCHANGE, DENSE) if side in self._step_seconds()]
        times = ["median", "min", "max", *(f"/ {side}" for side in references)]
        at = f"at {median(self.equal_seconds()):.4g} s"
        head = ["", *times, "sent", f"step {self.steps}", at, "validation"]
        units = ["", *["ms/step"] * 3, *["x"] * len(references), "MB/step", *["loss"] * 3]
        lines = [head, units]
        for row in self.rows():
            seconds = (row["step_seconds"], row["min_step_seconds"], row["max_step_seconds"])
            losses = (row["loss"], row["loss_at_equal_seconds"], row["validation_loss"])
            sent = row["sent_bytes"]
            line = [row["side"], *(f"{value * 1e3:.4g}" for value in seconds)]
            line += [_text(row["of"].get(side), ".3f") for side in references]
            line += [_text(sent and sent / 1e6, ".3g"), *(_text(loss, ".4f") for loss in losses)]
            lines.append(line)
        facts = [f"{name} {value}" for name, value in self.facts.items()]
        return "\n".join([*aligned(lines), ", ".join([*facts, load()])])

    def _step_seconds(self) -> dict[str, list[float]]:
        own = {side: [curve.step_seconds for curve in found] for side, found in self.curves.items()}
        return {NO_EXCHANGE: list(self.alone), **own}

    def _row(self, side: str) -> dict[str, Any]:
        by_side = self._step_seconds()
        values, curves = by_side[side], self.curves.get(side, ())
        of = {
            other: median(a / b for a, b in zip(values, by_side[other], strict=True))
            for other in (NO_EXCHANGE, DENSE)
            if other in by_side and side not in (other, NO_EXCHANGE)
        }
        at = zip(curves, self.equal_seconds(), strict=False)
        return {
            "side": side,
            "step_seconds": median(values),
            "min_step_seconds": min(values),
            "max_step_seconds": max(values),
            "of": of,
            "sent_bytes": _middle(curve.sent for curve in curves),
            "loss": _middle(curve.loss_after(self.steps) for curve in curves),
            "loss_at_equal_seconds": _middle(c.loss_at(seconds) for c, seconds in at),
            "validation_loss": _middle(curve.validation_loss for curve in curves),
        }


def _middle(values: Iterable[float]) -> float | None:
    """The median; None if there is no value or one is not finite."""
    found = list(values)
    return median(found) if found and all(map(math.isfinite, found)) else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
