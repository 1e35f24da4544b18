"""Check whether each step of the newest state was applied exactly once, to samples used once.

Each generation must show the steps from its start on, in order and each once. A later start at
step s rolls back all steps beyond s. So, if every start resumes from a state that existed, and the
kept lines are the lines that no later start rolled back, then the kept lines are the steps of the
newest state, each applied once.

A return to a checkpoint because of a loss spike passes over samples. Start events declare these
rollbacks, and a step's position in the order of samples follows from them.

Two facts show that a start at step s resumes from the state after step s: the number of steps that
were applied to its parameters and, if both states were hashed, equal hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hvdtrain.audit.ledger import GenerationRecord, Ledger, MetricsLine, StartEvent
from hvdtrain.data.buckets import Buckets
from hvdtrain.data.order import Indices, Order, same_until
from hvdtrain.engine.spikes import Rollback, rolled_back
from hvdtrain.untrusted import integer

# Values of start events that must not change during a run.
_IDENTITY = ("seed", "global_size", "dataset_size", "fingerprint", "per_step", "buckets")
_NORMAL_EXITS = (0, 75)
# Positions whose samples are computed: takes about a second.
LIMIT = 1 << 21
_TOGETHER = 1 << 12  # consecutive positions among those


@dataclass(frozen=True)
class AuditFinding:
    """A problem; a warning does not concern the steps."""

    kind: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Segment:
    """Steps first..last of the newest state, done by one generation; samples are positions.

    `sample_start` is included, `sample_stop` is not.
    """

    generation: int
    first: int
    last: int
    sample_start: int
    sample_stop: int
    world_size: int


class Redone(NamedTuple):
    """Minimum and maximum number of steps that a start rolled back; they are usually equal."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,} to {self.most:,}"

    def counted(self) -> str:
        """Return text such as "1 step"."""
        return f"{self} step{'' if self == (1, 1) else 's'}"


@dataclass
class Lineage:
    """Results of the checks.

    Args:
        redone: for each generation, the number of steps its start rolled back, see `redone_steps`
        skipped: steps of the newest state whose gradient was not finite
        spikes: steps of the newest state that were skipped because their loss was a spike
        unused: rollbacks because of a loss spike, with the positions of samples that are never used
    """

    findings: list[AuditFinding] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    redone: list[Redone] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    spikes: list[int] = field(default_factory=list)
    unused: list[tuple[Rollback, range]] = field(default_factory=list)

    def wrong(self, kind: str, message: str) -> None:
        self.findings.append(AuditFinding(kind, message))

    def warn(self, kind: str, message: str) -> None:
        self.findings.append(AuditFinding(kind, message, warning=True))


def trace(ledger: Ledger) -> Lineage:
    """Check a ledger."""
    lineage = Lineage()
    generations = ledger.generations
    if ledger.strays:
        lineage.wrong("ledger", f"the generation of steps {ledger.strays} has no start event")
    rollbacks = _rollback_steps(generations)
    for number, generation in enumerate(generations):
        _check_start(lineage, generations, number)
        _check_lines(lineage, generation, number, rollbacks[number])
        stops = {before.early_stop for before in generations[: number + 1]}
        _check_end(lineage, generation, number, stops)
    _check_states(lineage, ledger)
    _check_positions(lineage, generations)
    for number, (generation, beyond) in enumerate(zip(generations, rollbacks, strict=True)):
        first = generation.start.step
        last = generation.reached if beyond is None else beyond
        if last > first:
            start, stop = map(generation.start.samples_at, (first, last))
            world_size = generation.start.world_size
            lineage.segments.append(Segment(number, first + 1, last, start, stop, world_size))
        skipped = [line for line in generation.lines if line.kept and line.skipped]
        lineage.skipped += [line.step for line in skipped if not line.spike]
        lineage.spikes += [line.step for line in skipped if line.spike]
    _check_rollbacks(lineage, generations)
    lineage.unused = generations[-1].start.unused()
    return lineage


def redone_steps(before: GenerationRecord, start: StartEvent) -> Redone:
    """Return the number of steps of a generation that the next start rolled back.

    Steps after the last line are known only from an end event; a killed process writes none.
    """
    reached = most = before.reached
    if before.end is None:
        # The next multiple of train.log_every would have a line, and so would the last step.
        unlogged = (reached // before.log_every + 1) * before.log_every - 1
        since_common_state = start.step + before.start.sync_every
        limit = before.start.total_steps - 1
        if start.source == "memory":
            limit = since_common_state
        elif start.source == "memory_copy":
            limit = start.lost_step or start.step
        most = max(reached, min(unlogged, limit))
    return Redone(max(0, reached - start.step), max(0, most - start.step))


def _rollback_steps(generations: list[GenerationRecord]) -> list[int | None]:
    """For each generation, the step beyond which a later start rolled back its steps."""
    result: list[int | None] = []
    lowest: int | None = None
    for generation in reversed(generations):
        result.append(lowest)
        step = generation.start.step
        lowest = step if lowest is None else min(lowest, step)
    return result[::-1]


def _check_positions(lineage: Lineage, generations: list[GenerationRecord]) -> None:
    """Check that the position of data with a state of its own is a function of the step."""
    # The state after a return because of a loss spike is the checkpoint's.
    starts = [
        g.start for g in generations if g.start.data_position is not None and g.start.spike is None
    ]
    for one, other in pairwise(sorted(starts, key=lambda start: start.batches_at(start.step))):
        assert one.data_position is not None and other.data_position is not None
        same = one.batches_at(one.step) == other.batches_at(other.step)
        if (
            (one.data_position != other.data_position)
            if same
            else (one.data_position >= other.data_position)
        ):
            lineage.wrong(
                "samples",
                f"generation {one.generation} begins at step {one.step} with {one.data_position} "
                f"(passes, samples) of its data, and generation {other.generation} at step "
                f"{other.step} with {other.data_position}",
            )


def _check_start(lineage: Lineage, generations: Sequence[GenerationRecord], number: int) -> None:
    start, first = generations[number].start, generations[0]
    before = generations[max(number - 1, 0)]
    if start.generation != number:
        lineage.wrong(
            "ledger",
            f"start event {number} has generation {start.generation}: a start event is missing or "
            "duplicated",
        )
    for name in _IDENTITY:
        was, now = getattr(first.start, name), getattr(start, name)
        if was != now:
            lineage.wrong(
                "identity", f"generation {number}: {name} is {now}, in generation 0 it was {was}"
            )
    if not same_until(start.step, start.order or {}, before.start.order or {}):
        lineage.wrong(
            "identity",
            f"generation {number} begins at step {start.step}, before which its order of samples "
            "differs from the order of the previous generation",
        )
    if start.samples != start.samples_at(start.step):
        lineage.wrong(
            "samples",
            f"generation {number} begins at sample {start.samples}, but step {start.step} ends at "
            f"{start.samples_at(start.step)}",
        )
    if start.data_position is not None and start.dataset_size:
        passes, read = start.data_position
        at = passes * start.dataset_size + read
        if at != start.samples:
            lineage.wrong(
                "samples",
                f"generation {number} begins at sample {start.samples}, but its data at {at}",
            )
    if start.applied is not None and start.applied != start.step:
        lineage.wrong(
            "double" if start.applied > start.step else "gap",
            f"generation {number} begins at step {start.step}, but {start.applied} steps were "
            "applied to its parameters",
        )
    ranks = sorted(rank for ranks in start.hosts.values() for rank in ranks)
    if len(ranks) != start.world_size or ranks != list(range(start.world_size)):
        lineage.wrong(
            "world_size",
            f"generation {number} has {start.world_size} ranks, but its hosts hold ranks {ranks}",
        )


def _check_rollbacks(lineage: Lineage, generations: list[GenerationRecord]) -> None:
    """Check that samples were passed over only where a start declares a rollback.

    Steps of one generation use consecutive samples. So, if the rollbacks of a generation are those
    of the kept steps before it, and new ones to the step at which it begins, no sample is used
    twice, and the samples between two generations are the declared ones.
    """
    before = generations[0].start.rollbacks
    for segment in lineage.segments:
        own = generations[segment.generation].start.rollbacks
        old, new = own[: len(before)], own[len(before) :]
        if old != before or any(rollback[0] != segment.first - 1 for rollback in new):
            lineage.wrong(
                "samples",
                f"generation {segment.generation} continues after step {segment.first - 1} with "
                f"rollbacks {own}, but the state of that step had {before}",
            )
        before = own
    for number, (last, generation) in enumerate(pairwise(generations), start=1):
        start = generation.start
        if start.spike is None:
            continue
        step = integer(start.spike.get("step"))
        expected = (
            rolled_back(last.start.rollbacks, start.step, step)
            if step is not None and step > max(last.reached, start.step)
            else None
        )
        if start.rollbacks != expected:
            lineage.wrong(
                "samples",
                f"generation {number} returned from a loss spike at step {step} to step "
                f"{start.step}, and its rollbacks are {start.rollbacks}; expected {expected}",
            )


def _check_lines(
    lineage: Lineage, generation: GenerationRecord, number: int, beyond: int | None
) -> None:
    """Check that the lines of one generation are consecutive and that the right ones were kept."""
    where, before = f"generation {number}", generation.start.step
    for line in generation.lines:
        if line.step <= generation.start.step:
            lineage.wrong(
                "double",
                f"step {line.step} was done in {where}, which began at step {before}",
            )
            continue
        if line.step == before:
            lineage.wrong("double", f"step {line.step} was done twice in {where}")
        _check_gap(lineage, generation, number, before, line.step)
        _check_line(lineage, generation, number, line)
        rolled_back = beyond is not None and line.step > beyond
        if line.kept == rolled_back:
            lineage.wrong(
                "double" if line.kept else "gap",
                f"step {line.step} of {where} "
                + (
                    f"was rolled back by a later start at step {beyond}, but still counts"
                    if line.kept
                    else "is marked as rolled back, but no later start rolled it back"
                ),
            )
        before = line.step
    needed = generation.reached if beyond is None else max(generation.reached, beyond)
    _check_gap(lineage, generation, number, before, needed + 1)


def _check_gap(
    lineage: Lineage, generation: GenerationRecord, number: int, before: int, step: int
) -> None:
    """Check that every multiple of train.log_every between two steps has a line."""
    every = generation.log_every
    first, last = (before // every + 1) * every, (step - 1) // every * every
    if first <= last:
        where = f"of generation {number}"
        which = (
            f"step {first} {where} has"
            if first == last
            else f"steps {first} to {last} {where} have"
        )
        lineage.wrong("gap", f"{which} no line of metrics")


def _check_line(
    lineage: Lineage, generation: GenerationRecord, number: int, line: MetricsLine
) -> None:
    start = generation.start
    if line.samples != start.samples_at(line.step):
        lineage.wrong(
            "samples",
            f"step {line.step} ends at sample {line.samples} instead of "
            f"{start.samples_at(line.step)}",
        )
    if line.world_size != start.world_size:
        lineage.wrong(
            "world_size",
            f"step {line.step} was done by {line.world_size} ranks, but generation {number} has "
            f"{start.world_size}",
        )


def _check_end(
    lineage: Lineage, generation: GenerationRecord, number: int, stops: set[int]
) -> None:
    """Check the end of a generation.

    Args:
        stops: steps after which the validation loss ended the run.
    """
    if generation.end is None:
        return
    step, code = generation.end
    steps = [generation.start.step, *(line.step for line in generation.lines)]
    if code in _NORMAL_EXITS and step != max(steps):
        lineage.wrong(
            "gap",
            f"generation {number} ended after step {step}, but its last line of metrics is of step "
            f"{max(steps)}",
        )
    if code == 0 and step < generation.start.total_steps and step not in stops:
        lineage.wrong(
            "gap",
            f"generation {number} ended with exit code 0 after step {step} of "
            f"{generation.start.total_steps}",
        )


def _check_states(lineage: Lineage, ledger: Ledger) -> None:
    """Check that every start resumes from a state that existed and that checkpoints are on disk."""
    first = ledger.generations[0].start
    begin = first.step  # above 0 if the run resumes from another run's checkpoint
    if first.source.startswith("memory") or (first.source == "new" and begin != 0):
        lineage.wrong("state", f"the run begins at step {begin} from {first.source}")
    reached, saved = begin, set[int]()
    for number, generation in enumerate(ledger.generations):
        start = generation.start
        if number:
            _check_state(lineage, ledger, number, saved, reached)
            lineage.redone.append(redone_steps(ledger.generations[number - 1], start))
        else:
            lineage.redone.append(Redone(0, 0))
        saved = {step for step in saved if step <= start.step} | generation.checkpoints.keys()
        reached = generation.reached
    for step in sorted(set(ledger.saved) - saved):
        lineage.warn("checkpoint", f"the checkpoint of step {step} on disk has no event")
    if saved and max(saved) not in ledger.saved:
        lineage.warn("checkpoint", f"the checkpoint of step {max(saved)} is not on disk")


def _check_state(
    lineage: Lineage, ledger: Ledger, number: int, saved: set[int], reached: int
) -> None:
    start, begin = ledger.generations[number].start, ledger.generations[0].start
    where = f"generation {number} begins at step {start.step}"
    if start.source in ("memory", "memory_copy"):
        before_hash = _hash_before(ledger.generations[:number], start.step)
        if None not in (before_hash, start.state_hash) and before_hash != start.state_hash:
            lineage.wrong(
                "state",
                f"{where} from a state that differs from the state after this step (hashes differ)",
            )
    if start.source == "memory":
        # Steps between lines are unknown. The ranks are at most one step apart, or return to the
        # last step with a common state: every `apart` steps, and at the end of a generation.
        before = ledger.generations[number - 1]
        apart = max(1, before.start.sync_every)
        known = start.step % apart == 0 or start.step in (before.start.step, reached)
        if not reached - apart <= start.step < reached + before.log_every:
            lineage.wrong("state", f"{where} from memory, but step {reached} had been reached")
        elif start.step < reached and not known:
            lineage.wrong(
                "state",
                f"{where} from memory, but the ranks had no common state at that step "
                f"(exchange.sync_every {apart})",
            )
    elif start.source == "memory_copy":
        if not begin.step <= start.step < reached + ledger.generations[number - 1].log_every:
            lineage.wrong("state", f"{where} from copies, but only step {reached} had been reached")
    elif start.source == "new":
        if start.step != 0 or begin.source != "new":
            lineage.wrong("state", f"{where} as a new run, but the run began at step {begin.step}")
    elif start.step not in {*saved, *ledger.saved} and start.step != begin.step:
        lineage.wrong(
            "state", f"{where} from a checkpoint, but no checkpoint of that step was finished"
        )


def _hash_before(generations: Sequence[GenerationRecord], step: int) -> str | None:
    """Hash of the newest state after `step`; None if it is unknown."""
    for generation in reversed(generations):
        hashes = [line.state_hash for line in generation.lines if line.step == step]
        if hashes:
            return hashes[-1]
        if generation.start.step < step:
            return None  # it has no line of this step
        # One that began after this step is left by a later return to a checkpoint of this step.
        if generation.start.step == step and generation.start.state_hash is not None:
            return generation.start.state_hash
    return None


@dataclass(frozen=True)
class OrderCheck:
    """Positions `start`..`stop`-1 of the run, over epochs of `size` samples.

    Args:
        checked: number of positions in the interval whose sample was computed
        repeated: epochs in which two of these positions have the same sample, or in which a sample
            is not in the data
    """

    start: int
    stop: int
    size: int
    checked: int
    repeated: list[int]

    @property
    def epochs(self) -> float:
        return self.stop / self.size if self.size else 0.0

    @property
    def all_checked(self) -> bool:
        return self.checked == self.stop - self.start


def check_order(order: Order, start: int, stop: int, limit: int = LIMIT) -> OrderCheck:
    """Compute the samples of up to about `limit` positions and look for repetitions.

    If there are more positions, check evenly spaced epochs, and evenly spaced runs of positions in
    each of them.

    Args:
        order: of the run, or of a source of its mixture.
        start, stop: positions in the order, stop not included.
    """
    size = order.size
    # A source of a mixture may have no samples in these steps.
    epochs = range(start // size, -(-stop // size) if start < stop else start // size)
    spread = epochs[:: -(-len(epochs) * min(size, limit) // limit) or 1]
    checked, repeated = 0, []
    for epoch in spread:
        first, last = max(start, epoch * size), min(stop, (epoch + 1) * size)
        together = min(limit, _TOGETHER)
        every = -(-(last - first) // limit) * together
        runs = [order.samples(at, min(at + together, last)) for at in range(first, last, every)]
        samples = np.concatenate(runs)
        if _repeats(samples, size):
            repeated.append(epoch)
        checked += len(samples)
    return OrderCheck(start, stop, size, checked, repeated)


def check_buckets(start: int, stop: int, buckets: Buckets, limit: int = LIMIT) -> OrderCheck:
    """Check samples that are grouped by length, as `check_order` does.

    Args:
        start, stop: positions of micro-batches in the run, stop not included.
    """
    epochs = range(start // len(buckets), -(-stop // len(buckets)))
    spread = epochs[:: -(-len(epochs) * min(buckets.samples, limit) // limit) or 1]
    checked, repeated = 0, []
    for epoch in spread:
        begin = epoch * len(buckets)
        first, last = max(start, begin), min(stop, begin + len(buckets))
        every = -(-(last - first) * buckets.samples // (limit * len(buckets))) or 1
        places = buckets.places(np.arange(first, last, every, dtype=np.int64) - begin, epoch)
        if _repeats(places, buckets.samples):
            repeated.append(epoch)
        checked += len(places)
    samples = buckets.samples_before(start), buckets.samples_before(stop)
    return OrderCheck(*samples, buckets.samples, checked, repeated)


def _repeats(samples: Indices, size: int) -> bool:
    inside = ((samples >= 0) & (samples < size)).all()
    return not inside or len(np.unique(samples)) < len(samples)
