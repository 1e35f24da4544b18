"""Read the files of a run into columns; missing parts are reported."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.audit import ledger
from hvdtrain.errors import UserError
from hvdtrain.run_files.events_file import each_line
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime.mesh import WAITED
from hvdtrain.untrusted import is_of, parse_yaml, read_json, read_regular, real

Column = NDArray[np.floating[Any]]

_STEP_METRICS = (
    "step",
    "loss",
    "validation_loss",
    "samples_per_second",
    "step_seconds",
    "lr",
    "grad_norm",
    "mfu",
    "padding",
    "world_size",
    "time",
)
_VALIDATION = "validation_"
_RANK_METRICS = (
    "wall_seconds",
    "inflight_seconds",
    "bytes",
    "host_memory_bytes",
    "device_memory_bytes",
    "score",
    *(f"{axis}_wait_seconds" for axis in WAITED),
    "schedule_seconds",
    "parameter_bytes",
)


# Required types of manifest values, configuration groups and event values.
_MANIFEST: dict[str, Any] = {
    "task": str,
    "world_size": int,
    "hosts": dict[str, list[int]],
    "layout": list[str],
    "coordinates": list[dict[str, int]],
    "versions": dict[str, str],
    "horovod": dict[str, Any],
}
_GROUPS = ("batch", "parallel", "telemetry", "train")
_EVENTS: dict[str, dict[str, Any]] = {
    "start": {"step": int},
    "deal": {"step": int, "micro_batches": list[int]},
    "straggler": {"step": int, "rank": int, "host": str, "phase": str, "score": float},
    "straggler_ended": {"step": int, "rank": int},
}
_OPTIONAL = {"stage": int, "ranks": list[int]}
_RANKS = {
    "step": int,
    "steps": int,
    "phases": dict[str, list[Any]],  # checked as an array, which is faster
    "bubble_formula": float | None,
    "most_memory_bytes": dict[str, int],
    "collectives": dict[str, dict[str, float]],
}
_CALLED = {"calls", "bytes", "seconds"}


@dataclass
class RankSeries:
    """RUN/ranks.jsonl: L lines over R ranks; NaN if a line has no such rank.

    Args:
        step: last step of its window (L)
        steps: number of steps in the window (L)
        world_size: number of ranks of each line (L)
        phases: names of the P phases, as written by the run
        seconds: seconds of each phase in the window (P x L x R)
        metrics: name -> (L x R): wall_seconds, inflight_seconds, bytes, host_memory_bytes,
            device_memory_bytes, score; for a model that spans ranks AXIS_wait_seconds,
            schedule_seconds of a pipeline, parameter_bytes that the rank holds
        collectives: operation of hvdtrain.comm -> calls, bytes, seconds of rank 0; {} if none
        most_memory: phase -> peak bytes on any rank, of its device or resident
        bubble_formula: for a pipeline, the fraction that ranks would wait if all stages were
            equally fast
    """

    step: Column
    steps: Column
    world_size: Column
    phases: tuple[str, ...]
    seconds: Column
    metrics: dict[str, Column]
    collectives: dict[str, Counter[str]]
    most_memory: dict[str, int]
    bubble_formula: float | None = None

    @property
    def totals(self) -> Column:
        """Seconds of all phases together (L x R)."""
        total: Column = self.seconds.sum(axis=0)
        return total

    def of(self, phase: str) -> Column:
        """Seconds of one phase (L x R); zeros if the run did not record it."""
        if phase not in self.phases:
            return np.zeros_like(self.seconds[0])
        return self.seconds[self.phases.index(phase)]


@dataclass
class RecordedRun:
    """One run.

    Args:
        steps: column -> a value for each line of metrics.jsonl that counts (float64, NaN if the
            line had none): step, loss, validation_loss, samples_per_second, step_seconds,
            mfu, padding, world_size, time (Unix); of a mixture also loss_SOURCE
        validation: the task's own metrics of the last evaluation, by name
        ranks: None if ranks.jsonl has no lines
        ledger: None if there are no events
        events: events named straggler, straggler_ended, deal, start
        config, manifest: {} if they cannot be read
        missing: sentences on missing parts
    """

    path: Path
    steps: dict[str, Column]
    validation: dict[str, float]
    ranks: RankSeries | None
    ledger: ledger.Ledger | None
    events: list[dict[str, Any]]
    config: dict[str, Any]
    manifest: dict[str, Any]
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def host(self, rank: int) -> str:
        """The last host of a rank."""
        maps = [self.manifest.get("hosts", {})]
        if self.ledger is not None:
            maps = [g.start.hosts for g in reversed(self.ledger.generations)]
        return next((h for hosts in maps for h, ranks in hosts.items() if rank in ranks), "?")


def read(path: Path) -> RecordedRun:
    """Read RUN/.

    Raises:
        UserError: `path` is not a run directory, or cannot be read.
    """
    directory = RunDirectory(path)
    if not directory.manifest.exists():
        raise UserError(f"{path} is not a run directory: it has no manifest.json")
    missing: list[str] = []
    try:
        config = _config(directory, missing)
        found = _ledger(directory, missing)
        losses = [f"loss_{name}" for name in sources_of(found)]
        steps, validation = _steps(directory, losses, missing)
        _correct_times(steps, found)
        run = RecordedRun(
            path=path,
            steps=steps,
            validation=validation,
            ranks=_ranks(directory, config, missing),
            ledger=found,
            events=[event for event in _complete_lines(directory.events, []) if _is_known(event)],
            config=config,
            manifest=_manifest(directory, missing),
            missing=missing,
        )
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None
    return run


def _config(directory: RunDirectory, missing: list[str]) -> dict[str, Any]:
    path = directory.path / "config.yaml"
    try:
        content = parse_yaml(read_regular(path).decode("utf-8", "replace"))
    except (FileNotFoundError, ValueError):
        content = None
    groups = content if isinstance(content, dict) else {"batch": None}
    if not all(isinstance(groups.get(name, {}), dict) for name in _GROUPS):
        missing.append("config.yaml is missing or damaged: the configuration is not shown.")
        return {}
    return groups


def _manifest(directory: RunDirectory, missing: list[str]) -> dict[str, Any]:
    try:
        found = read_json(directory.manifest)
        wrong = [n for n, kind in _MANIFEST.items() if n in found and not is_of(found[n], kind)]
        if wrong:
            raise ValueError(wrong)
    except ValueError:
        missing.append("manifest.json is damaged: versions and hosts are not shown.")
        return {}
    return found


def _ledger(directory: RunDirectory, missing: list[str]) -> ledger.Ledger | None:
    if not directory.events.exists():
        missing.append(
            "There is no events.jsonl (older versions did not write it): restarts, goodput, "
            "checkpoints and slow ranks are unknown."
        )
        return None
    try:
        found = ledger.read(directory.path)
    except UserError as error:
        missing.append(f"Restarts, goodput and checkpoints are unknown: {error}.")
        return None
    missing += [f"{sentence[:1].upper()}{sentence[1:]}." for sentence in found.clocks]
    return found


def _complete_lines(path: Path, missing: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file, if it exists; report torn lines in `missing`."""
    torn = 0
    for line in each_line(path) if path.exists() else ():
        if line is None:
            torn += 1
        else:
            yield line
    if torn:
        lines = "line was" if torn == 1 else "lines were"
        missing.append(f"{torn} incomplete {lines} skipped in {path.name} (left by a crash).")


def _is_known(event: dict[str, Any]) -> bool:
    """Whether an event is one of `_EVENTS`, with values of the types that hvdtrain writes."""
    kind = event.get("event")
    wanted = _EVENTS.get(kind) if isinstance(kind, str) else None
    return (
        wanted is not None
        and all(is_of(event.get(name), of) for name, of in wanted.items())
        and all(is_of(event[name], of) for name, of in _OPTIONAL.items() if name in event)
    )


def sources_of(found: ledger.Ledger | None) -> list[str]:
    """Names of the sources of a mixture."""
    order = found.generations[-1].start.order if found else None
    return [*(order or {}).get("sources", ())]


def _steps(
    directory: RunDirectory, losses: list[str], missing: list[str]
) -> tuple[dict[str, Column], dict[str, float]]:
    """Args: losses: names of the losses of a mixture's sources."""
    columns = {name: array("d") for name in (*_STEP_METRICS, *losses)}
    validation: dict[str, float] = {}
    for line in _complete_lines(directory.metrics, missing):
        if not is_of(line.get("step"), int):
            continue
        for name, column in columns.items():
            value = real(line.get(name))
            column.append(np.nan if value is None else value)
        for name, found in line.items():
            if name.startswith(_VALIDATION) and (value := real(found)) is not None:
                validation[name.removeprefix(_VALIDATION)] = value
    validation.pop("loss", None)
    if not columns["step"]:
        missing.append("metrics.jsonl has no complete line: no step was logged.")
    return {name: np.array(column) for name, column in columns.items()}, validation


def _correct_times(steps: dict[str, Column], found: ledger.Ledger | None) -> None:
    """Convert times to the clock of the first host, as the ledger does."""
    if found is None or not found.clocks:
        return
    lines = [line for generation in found.generations for line in generation.lines if line.kept]
    times = {line.step: line.time for line in lines}
    pairs = zip(steps["step"].tolist(), steps["time"].tolist(), strict=True)
    steps["time"] = np.array([times.get(int(step), time) for step, time in pairs])


def _ranks(
    directory: RunDirectory, config: dict[str, Any], missing: list[str]
) -> RankSeries | None:
    heads, tables = [], []
    collectives: dict[str, Counter[str]] = {}
    most_memory: Counter[str] = Counter()
    phases: tuple[str, ...] = ()
    formula = None
    for line in _complete_lines(directory.ranks, missing):
        if not all(is_of(line[name], of) for name, of in _RANKS.items() if name in line):
            continue
        try:
            phases = phases or tuple(line["phases"])
            table = _table(line, phases)
            if table.ndim != 2:
                continue
            heads.append((line["step"], line["steps"], table.shape[1]))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            continue
        tables.append(table)
        formula = line.get("bubble_formula", formula)
        most_memory |= Counter(line.get("most_memory_bytes", {}))  # the larger of each
        for operation, called in line.get("collectives", {}).items():
            if called.keys() == _CALLED:
                collectives.setdefault(operation, Counter()).update(called)
    if not tables:
        off = config.get("telemetry", {}).get("exchange_every") == 0
        missing.append(
            "ranks.jsonl has no lines"
            + (" (telemetry.exchange_every is 0)" if off else "")
            + ": phases, communication, straggler scores and memory are unknown."
        )
        return None
    step, steps, world_size = np.array(heads, dtype=np.float64).T
    cube = np.full((len(tables[0]), len(tables), int(world_size.max())), np.nan, np.float32)
    for number, table in enumerate(tables):
        cube[:, number, : table.shape[1]] = table
    count = len(phases)
    metrics = dict(zip(_RANK_METRICS, cube[count:], strict=True))
    seconds = cube[:count]
    memory = dict(most_memory)
    return RankSeries(
        step, steps, world_size, phases, seconds, metrics, collectives, memory, formula
    )


def _table(line: dict[str, Any], phases: tuple[str, ...]) -> Column:
    """Convert a line of ranks.jsonl to (phases and metrics) x ranks."""
    rows = [line["phases"][phase] for phase in phases]
    unknown = [np.nan] * len(rows[0])
    rows += [line.get(name, unknown) for name in _RANK_METRICS]
    return np.array(rows, dtype=np.float32)
