"""Comparison of gradient exchange strategies in real runs under their launcher."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench.exchange_report import NO_EXCHANGE, WARM_UP_STEPS, Curve, ExchangeReport
from hvdtrain.bench.jobs import RANK
from hvdtrain.bench.processes import LIMIT_S, QUIET, finish, launch, measure, on_threads, worker
from hvdtrain.config import Config, parse
from hvdtrain.errors import UserError
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.run_files.events_file import read_lines
from hvdtrain.run_files.run_directory import RunDirectory

# Name -> keys of `exchange`; keys set by one strategy have their defaults in the others.
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "float16": {"wire": "float16"},
    "bfloat16": {"wire": "bfloat16"},
    "topk": {"compression": "topk"},
    "powersgd": {"compression": "powersgd"},
    "local_sgd": {"sync_every": 8},
    "diloco": {"sync_every": 8, "outer": "nesterov", "outer_momentum": 0.5},
    "exact": {"name": "exact"},
}
_LEAST_STEPS = 2 * WARM_UP_STEPS
_SECONDS_A_STEP = 30.0  # limit per step of a run, in addition to LIMIT_S


@dataclass(frozen=True)
class Ranks:
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
                f"--strategies: {name or 'an empty name'} is none of {', '.join(STRATEGIES)}"
            )
    return list(dict.fromkeys(names))


def check_steps(steps: int) -> None:
    """Raise UserError if a run of `steps` steps is too short to be measured."""
    if steps < _LEAST_STEPS:
        raise UserError(
            f"--steps {steps}: the first {WARM_UP_STEPS} steps count neither as time nor as "
            f"bytes, so give {_LEAST_STEPS} or more"
        )


def exchange(
    flags: Sequence[str], strategies: Sequence[str], steps: int, rounds: int, ranks: Ranks
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


def _check(config: Config, ranks: Ranks) -> None:
    for key, default in _defaults().items():
        value = getattr(config.exchange, key)
        if value != default:
            raise UserError(
                f"exchange.{key} {value}: the strategies set this key; choose one with "
                "--strategies, and omit the key"
            )
    if ranks.launcher == "mpi" and shutil.which("mpirun") is None:
        raise UserError("--launcher mpi: mpirun is not installed; choose --launcher gloo")


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


def _run(flags: Sequence[str], steps: int, ranks: Ranks, root: Path) -> Curve:
    with tempfile.TemporaryDirectory(dir=root) as path:
        own = [
            *(f"--run.root={path}", "--run.id=bench", "--run.resume=auto"),
            *(f"--train.steps={steps}", "--train.log_every=1"),
            *(f"--eval.every={steps}", f"--telemetry.exchange_every={WARM_UP_STEPS}"),
        ]
        command = [sys.executable, *RANK, *flags, *own]
        limit = LIMIT_S + steps * _SECONDS_A_STEP
        finish(launch(ranks.launcher, ranks.np, command, ranks.hosts), limit=limit)
        return read_curve(RunDirectory(Path(path, "bench")))


def _finite(value: float | None) -> float:
    """Return nan for null, which metrics.jsonl has for non-finite values."""
    return math.nan if value is None else value
