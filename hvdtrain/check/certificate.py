"""Order of a check: the runs, their comparison, and further runs only if something differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.check.causes import CheckEvidence, likely_causes
from hvdtrain.check.runs import CheckRun, RunStarter, pins_hashes
from hvdtrain.check.traces import Difference, changing_names, first_difference, only_rounded
from hvdtrain.config_files import read_yaml
from hvdtrain.errors import UserError
from hvdtrain.text import aligned, plural

_OUTPUT_LINES = 15


@dataclass(frozen=True)
class Row:
    """Comparison of a run with the run on one rank.

    Args:
        wrong: how the run has ended, if not as the run on one rank; "" if it has.
        notes: what the comparison does not cover.
    """

    run: CheckRun
    difference: Difference | None
    wrong: str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, first: CheckRun, run: CheckRun, notes: tuple[str, ...] = ()) -> Row:
        """Compare a run with the run on one rank."""
        last, wanted = run.trace.last, first.trace.last
        wrong = run.failure or ("" if last == wanted else f"ended after step {last}, not {wanted}")
        return cls(run, first_difference(first.trace, run.trace), wrong, notes)

    @property
    def same(self) -> bool:
        return self.difference is None and not self.wrong

    def to_text(self) -> str:
        found = self.difference.to_text() if self.difference else ""
        return "; ".join(filter(None, (found, self.wrong))) or "the same"


@dataclass(frozen=True)
class Certificate:
    """Result of a check.

    Args:
        causes: likely causes, if something differs.
        rounded: numbers that are equal within a tolerance only.
        warnings: of the runs.
        total: steps of all runs.
    """

    steps: int
    first: CheckRun
    rows: Sequence[Row]
    causes: Sequence[str]
    rounded: Sequence[str]
    warnings: Sequence[str]
    total: int

    @property
    def same(self) -> bool:
        return all(row.same for row in self.rows)

    def to_text(self) -> str:
        table = [("run", "compared with 1 rank")]
        table += [(row.run.title, row.to_text()) for row in self.rows]
        lines = aligned(table, left=(0, 1))
        lines += [f"likely cause: {cause}" for cause in self.causes]
        lines += [f"note: {note}" for row in self.rows for note in row.notes]
        if self.rounded:
            lines.append(f"note: equal within a rounding error only: {', '.join(self.rounded)}")
        lines += [f"warning: {warning}" for warning in self.warnings]
        verdict = (
            "the same losses, parameters, optimizer state, script state and samples"
            if self.same
            else "NOT the same"
        )
        lines.append(f"{verdict} ({plural(self.steps, 'step')}, {self.total} in all runs)")
        return "\n".join(lines)


def check(runs: RunStarter) -> Certificate:
    """Run the command on several numbers of ranks, and compare the runs.

    Raises:
        UserError: the command does not train on one rank, or its batch depends on the ranks.
    """
    first = runs.alone()
    if first.failure or not first.trace.steps:
        raise UserError(_of_first(first))
    _check_batch(first)
    ranks = runs.on_ranks()
    notes: tuple[str, ...] = ()
    if ranks.failure and not ranks.trace.steps:
        without = runs.on_ranks(workers=0)
        if without.trace.steps:
            notes = (f"with data workers the run {ranks.failure}",)
            ranks = without
    rows = [Row.of(first, ranks, notes), Row.of(first, runs.resumed(first))]
    elastic = runs.elastic()
    joined = elastic.trace.sizes()
    missing = not elastic.failure and len(joined) < 3
    rows.append(
        Row.of(first, elastic, (f"ranks in the run: {joined}, no rank joined",) if missing else ())
    )
    made = [first, *(row.run for row in rows)]
    causes: list[str] = []
    if any(row.difference for row in rows):
        evidence, further = _evidence(runs, first, rows)
        causes, made = likely_causes(evidence), [*made, *further]
    rounded = dict.fromkeys(n for row in rows for n in only_rounded(first.trace, row.run.trace))
    return Certificate(
        runs.steps,
        first,
        rows,
        causes,
        [*rounded] if all(row.same for row in rows) else [],
        first.warnings(),
        sum(_steps_of(run) for run in made),
    )


def _evidence(
    runs: RunStarter, first: CheckRun, rows: Sequence[Row]
) -> tuple[CheckEvidence, list[CheckRun]]:
    """Find what differs without other ranks, by runs on one rank."""
    made: list[CheckRun] = []

    def differs(start: Callable[[], CheckRun]) -> Difference | None:
        made.append(start())
        return first_difference(first.trace, made[-1].trace)

    ranks, resumed, elastic = (row.difference for row in rows)
    repeat = differs(lambda: runs.alone("1 rank again"))
    repeated = made[-1].trace
    hashes = workers = alone = None
    if repeat is None and not pins_hashes():
        hashes = differs(lambda: runs.alone("1 rank with another hash seed", hash_seed=2))
    if repeat is None and hashes is None and ranks is not None:
        if "sample" in ranks.kinds:
            workers = differs(lambda: runs.alone("1 rank with data workers", workers=2))
        if resumed is not None:
            alone = differs(lambda: runs.resumed(first, ranks=1))
    texts = [line for run in (first, *(row.run for row in rows), *made) for line in run.output]
    warnings = [w for run in (first, *(row.run for row in rows)) for w in run.warnings()]
    if repeat is None:
        noise = changing_names(first.trace, repeated)
        ranks, resumed, elastic, alone = (
            one and one.without(noise) for one in (ranks, resumed, elastic, alone)
        )
    evidence = CheckEvidence(
        first.trace,
        ranks,
        resumed,
        elastic,
        repeat,
        repeated,
        hashes,
        workers,
        alone,
        [*warnings, *texts],
    )
    return evidence, made


def _of_first(first: CheckRun) -> str:
    end = "\n".join(line for line in first.output[-_OUTPUT_LINES:] if line.strip())
    if first.failure:
        return f"the run on 1 rank {first.failure}\n{end}"
    return (
        "the run on 1 rank took no step of hvdtrain.training: the script must pass its command "
        f"line to it (argv), and train\n{end}"
    )


def _check_batch(first: CheckRun) -> None:
    size = read_yaml(first.directory.config).get("batch", {}).get("per_rank_size", 0)
    if size:
        raise UserError(
            f"batch.per_rank_size {size}: the global batch depends on the number of ranks, so the "
            "runs cannot be the same: set batch.global_size for the check"
        )


def _steps_of(run: CheckRun) -> int:
    return len(run.trace.steps)
