"""Breakdown of a run's wall time. The parts add up to the wall time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdtrain.audit.ledger import GenerationRecord, Ledger

# Part -> its description in the report.
PARTS = {
    "steps": "steps that count",
    "redone": "steps that were rolled back and repeated",
    "recovery": "recovery: from the last step before a failure, a rollback or a change of hosts",
    "start": "first start of the program, up to its first step",
    "restart": "later starts of the program, each up to its first step",
    "down": "program not running: from the last step before it ended until its next start",
    "checkpoint": "stalls by checkpoints, at most",
    "evaluation": "evaluation",
    "other": "other",
}


@dataclass
class Goodput:
    """Seconds in each part of `PARTS`.

    The wall time begins with the start of rank 0's first process, before its imports, and ends
    with the run's last line of metrics or event.
    """

    wall: float
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def share(self) -> float:
        """Share of the time in steps that count; 0 if the wall time is 0."""
        return self.parts["steps"] / self.wall if self.wall > 0 else 0.0


def measure(ledger: Ledger) -> Goodput:
    """Add up the times between the lines of metrics and events of a run."""
    generations = ledger.generations
    first, end = generations[0].start, generations[-1].last_time
    goodput = Goodput(max(0.0, end - ledger.began))
    goodput.parts["start"] += first.seconds
    now = first.time
    for generation, following in zip(generations, [*generations[1:], None], strict=True):
        stop = max(now, following.start.time if following else end)
        now, step = _add_steps(goodput.parts, generation, now, stop)
        if following is None:
            _add_gap(goodput.parts, generation, step, generation.reached + 1, stop - now)
        elif following.start.cause == "launch":
            starting = min(following.start.seconds, stop - now)
            goodput.parts["restart"] += starting
            goodput.parts["down"] += stop - now - starting
        else:
            goodput.parts["recovery"] += stop - now
        now = stop
    return goodput


def _add_steps(
    parts: dict[str, float], generation: GenerationRecord, now: float, stop: float
) -> tuple[float, int]:
    """Add the time from `now` to the generation's last line; return that line's (time, step)."""
    step = generation.start.step
    for line in generation.lines:
        until = max(now, min(line.time, stop))
        stepping = min(max(0, line.step - step) * line.step_seconds, until - now)
        parts["steps" if line.kept else "redone"] += stepping
        _add_gap(parts, generation, step, line.step, until - now - stepping)
        now, step = until, line.step
    return now, step


def _add_gap(
    parts: dict[str, float], generation: GenerationRecord, step: int, following: int, gap: float
) -> None:
    """Add time in which no step ran, between the lines of two steps."""
    start = generation.start
    if step == start.step:
        launched = "restart" if start.generation else "start"
        parts[launched if start.cause == "launch" else "recovery"] += gap
        return
    # A checkpoint written in the background takes longer than it stalls the steps.
    steps, saved = range(step, following), generation.checkpoints
    if len(steps) < len(saved):
        whole = sum(saved.get(s, 0.0) for s in steps)
    else:
        whole = sum(seconds for s, seconds in saved.items() if s in steps)
    saving = min(gap, whole)
    parts["checkpoint"] += saving
    parts["evaluation" if step in generation.evaluated else "other"] += gap - saving
