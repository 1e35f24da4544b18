"""The files of a run, read into one object.

The generations of a run are the intervals between its starts. A start is a launch, or an
in-memory restart after a failure or a change of hosts. A line of metrics names the generation that
did its step; the next generation may have written the line. No check depends on times, because a
clock may be set back and the clocks of two hosts may differ. Lines of older versions name no
generation; each belongs to the last generation that began before its time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.layout import finished, step_of
from hvdtrain.data.buckets import Buckets
from hvdtrain.data.order import Order, build_order, check_specification
from hvdtrain.engine.spikes import Rollback, passed_over
from hvdtrain.errors import UserError
from hvdtrain.run_files.events_file import each_line, read_lines
from hvdtrain.run_files.run_directory import RunDirectory, configured
from hvdtrain.untrusted import checked, is_of, parse_yaml, read_json, shown

# Beyond these limits, arithmetic on positions in the sample order exceeds 63 bits.
_MOST_STEPS = 1 << 32
_MOST_SAMPLES = 1 << 30
_MOST_POSITION = _MOST_STEPS * _MOST_SAMPLES
_MOST_SECONDS = 1e11  # a date in the year 5138
_CLOCK_SECONDS = 5.0  # smaller differences of clocks are ignored


@dataclass(frozen=True)
class StartEvent:
    """A start event; step and samples describe the state from which the run continues.

    Args:
        own_order: the dataset defines its own order, which only the dataset knows.
        data_position: passes that such a dataset has completed, and samples read in the next one,
            if it saves its position.
        depends_on_ranks: the setting that makes the curve depend on the number of ranks.
        sync_every: local steps of a rank until all ranks have one state again; 0 = none.
        per_step: micro-batches per step, with `buckets`.
        buckets: with batch.max_tokens, see data/buckets.py.
        order: specification of the order of samples, see data/order.py; None: shuffled.
        log_every: steps between lines of metrics; 0: an older version, see manifest.json.
        applied: steps applied to the tensors of the state; older runs did not write it.
        lost_step: the step whose state was lost with the ranks that held it, if any.
        damaged_copies: copies in memory that were not used, because their hash was wrong.
        state_hash: hash of the state, if it came from memory and train.replica_check_every > 0.
        rollbacks: returns to a checkpoint because of a loss spike, see engine/spikes.py.
        spike: the spike because of which this start returned to a checkpoint, if any.
        seen: (step, time) of the last lines of metrics before this start, by the clock of the host
            that wrote it.
        samples_compared: of data without a fingerprint, how many samples the ranks compared.
        borrowed: hosts that a batch system lends to the run, and since when (unix time).
    """

    time: float
    generation: int
    cause: str
    step: int
    samples: int
    world_size: int
    hosts: dict[str, list[int]]
    source: str
    seconds: float
    global_size: int
    seed: int
    dataset_size: int
    fingerprint: str | None
    total_steps: int
    own_order: bool = False
    data_position: list[int] | None = None
    depends_on_ranks: str = ""
    sync_every: int = 0
    per_step: int = 0
    buckets: list[list[int]] | None = None
    order: dict[str, Any] | None = None
    log_every: int = 0
    applied: int | None = None
    lost_step: int | None = None
    damaged_copies: list[str] | None = None
    state_hash: str | None = None
    rollbacks: list[list[int]] = field(default_factory=list)
    spike: dict[str, float | None] | None = None
    seen: list[list[float]] = field(default_factory=list)
    samples_compared: int | None = None
    borrowed: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _in_range("time", self.time, -_MOST_SECONDS, _MOST_SECONDS)
        _in_range("seconds", self.seconds, -_MOST_SECONDS, _MOST_SECONDS)
        _in_range("samples", self.samples, 0, _MOST_POSITION)
        for name in ("step", "total_steps", "sync_every", "per_step", "log_every"):
            _in_range(name, getattr(self, name), 0, _MOST_STEPS)
        for name in ("global_size", "world_size", "dataset_size"):
            unknown = name == "dataset_size" and self.own_order
            low = 0 if name == "global_size" or unknown else 1
            most = _MOST_POSITION if name == "dataset_size" else _MOST_SAMPLES
            _in_range(name, getattr(self, name), low, most)
        if self.data_position is not None and len(self.data_position) != 2:
            raise ValueError(f"data_position has {shown(self.data_position)}")
        for bucket in self.buckets or ():
            if len(bucket) != 2:
                raise ValueError(f"buckets has {shown(bucket)}")
            for count in bucket:
                _in_range("buckets", count, 1, _MOST_STEPS)
        if self.order is not None and check_specification(self.order) != self.dataset_size:
            raise ValueError(f"dataset_size is {self.dataset_size}, but the order has another size")
        for rollback in self.rollbacks:
            if len(rollback) != len(Rollback._fields):
                raise ValueError(f"rollbacks has {shown(rollback)}")
            to, spike, batches = rollback
            _in_range("rollbacks", to, 0, self.step)
            _in_range("rollbacks", spike, to + 1, _MOST_STEPS)
            _in_range("rollbacks", batches, 1, _MOST_STEPS)
        _in_range("rollbacks", passed_over(self.rollbacks), 0, _MOST_STEPS // 2)
        for seen in self.seen:
            if len(seen) != 2:
                raise ValueError(f"seen has {shown(seen)}")
            _in_range("seen", seen[0], 0, _MOST_STEPS)
            _in_range("seen", seen[1], -_MOST_SECONDS, _MOST_SECONDS)

    @property
    def first_host(self) -> str:
        """Host of rank 0, by whose clock the times are."""
        return next((host for host, ranks in self.hosts.items() if 0 in ranks), "")

    @cached_property
    def micro_batches(self) -> Buckets | None:
        """Order of micro-batches by length."""
        return Buckets(self.buckets, self.seed) if self.buckets else None

    @cached_property
    def samples_in_order(self) -> Order:
        """Order of samples, without `buckets` and `own_order`."""
        specification = self.order or {"size": self.dataset_size}
        return build_order(specification, self.seed, self.global_size)

    def batches_at(self, step: int) -> int:
        """Number of global batches that the run has used or passed over after `step` steps."""
        return step + passed_over(self.rollbacks)

    def samples_at(self, step: int) -> int:
        """Position in the order of samples after `step` steps."""
        return self._samples_before(self.batches_at(step))

    def _samples_before(self, batch: int) -> int:
        if self.micro_batches is None:
            return batch * self.global_size
        return self.micro_batches.samples_before(batch * self.per_step)

    def unused(self) -> list[tuple[Rollback, range]]:
        """Return each rollback and the positions of the samples that it passed over."""
        found, passed = [], 0
        for rollback in (Rollback(*one) for one in self.rollbacks):
            first = rollback.to + passed
            passed += rollback.batches
            samples = map(self._samples_before, (first, first + rollback.batches))
            found.append((rollback, range(*samples)))
        return found


@dataclass(frozen=True)
class MetricsLine:
    """The step that a line of metrics describes; `kept` if no restart rolled it back.

    Args:
        generation: its number in the run; None: an older version wrote the line.
    """

    generation: int | None
    step: int
    samples: int
    world_size: int
    step_seconds: float
    time: float
    kept: bool
    skipped: bool = False
    spike: bool = False
    evaluated: bool = False
    state_hash: str | None = None

    def __post_init__(self) -> None:
        _in_range("step", self.step, 0, _MOST_STEPS)
        _in_range("samples", self.samples, 0, _MOST_POSITION)
        _in_range("time", self.time, -_MOST_SECONDS, _MOST_SECONDS)
        _in_range("step_seconds", self.step_seconds, 0, _MOST_SECONDS)


@dataclass
class GenerationRecord:
    """A start and all that followed it.

    Args:
        lines: by step, including lines that were rolled back later
        checkpoints: step -> seconds it took
        stalls: step -> seconds by which its checkpoint stalled the steps, if known; older runs
            did not write it
        failed: steps whose checkpoint could not be written
        healed: step -> ranks
        replays: step -> what a replay in which gradients differed has shown, and the hosts
        early_stop: step after which the validation loss ended the run; 0: it did not end it
        end: (step, exit code), or None if it was killed or still runs
        events: (step, time) of each event after the start
        last_time: time of its last line or event
        log_every: steps between lines
    """

    start: StartEvent
    lines: list[MetricsLine] = field(default_factory=list)
    checkpoints: dict[int, float] = field(default_factory=dict)
    stalls: dict[int, float] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    healed: dict[int, list[int]] = field(default_factory=dict)
    replays: dict[int, tuple[str, list[str]]] = field(default_factory=dict)
    early_stop: int = 0
    end: tuple[int, int] | None = None
    events: list[tuple[int, float]] = field(default_factory=list)
    last_time: float = 0.0
    log_every: int = 1

    @property
    def reached(self) -> int:
        """The last step that a line, a checkpoint or the end event shows."""
        steps = [self.start.step, *(line.step for line in self.lines), *self.checkpoints]
        return max([*steps, self.end[0]] if self.end else steps)

    @cached_property
    def evaluated(self) -> set[int]:
        """Steps followed by an evaluation."""
        return {line.step for line in self.lines if line.evaluated}


@dataclass
class Ledger:
    """A run. Times are corrected so that they never decrease, and all are by the first clock.

    Args:
        generations: in the order of their starts
        saved: steps of the finished checkpoints on disk
        strays: steps of lines whose generation has no start event
        clocks: sentences about clocks that differ or were set back
    """

    path: Path
    generations: list[GenerationRecord]
    saved: list[int]
    strays: list[int]
    clocks: list[str]

    @property
    def began(self) -> float:
        """Unix time at which rank 0's process was first started."""
        first = self.generations[0].start
        return first.time - first.seconds


def read(path: Path) -> Ledger:
    """Read RUN/.

    Raises:
        UserError: there is no run, or it predates the event log.
    """
    directory = RunDirectory(path)
    if not directory.manifest.exists():
        raise UserError(f"{path} is not a run directory: it has no manifest.json")
    if not directory.events.exists():
        raise UserError(
            f"{path} has no events.jsonl: the run was made by a version of hvdtrain that did not "
            "write it, so its restarts are unknown and it cannot be audited"
        )
    try:
        events = read_lines(directory.events)
        generations = _generations(events)
        strays = _assign(_lines(directory), generations)
        clocks = _correct_times(generations)
        configs = configured(read_json(directory.manifest)["starts"])
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: a file is not in hvdtrain's format ({error})") from None
    if not generations:
        raise UserError(f"{directory.events} has no start event")
    for generation in generations:
        start = generation.start
        generation.log_every = start.log_every or _log_every(configs, start.time, directory)
    return Ledger(path, generations, _saved(directory), strays, clocks)


def _generations(events: list[dict[str, Any]]) -> list[GenerationRecord]:
    generations: list[GenerationRecord] = []
    for event in events:
        kind = event.get("event")
        if kind == "start":
            generations.append(GenerationRecord(checked(StartEvent, event)))
            continue
        if not generations:
            continue
        now = generations[-1]
        now.events.append((_step(event) if "step" in event else 0, _value(event, "time", float)))
        if kind == "checkpoint":
            step = _step(event)
            now.checkpoints[step] = _value(event, "seconds", float)
            if "stall_seconds" in event:
                now.stalls[step] = _value(event, "stall_seconds", float)
        elif kind == "checkpoint_failed":
            now.failed.append(_step(event))
        elif kind == "healed":
            now.healed[_step(event)] = _value(event, "ranks", list[int])
        elif kind == "replay":
            found = _value(event, "verdict", str), _value(event, "hosts", list[str])
            now.replays[_step(event)] = found
        elif kind == "early_stop":
            now.early_stop = _step(event)
        elif kind == "end":
            now.end = _step(event), _value(event, "exit_code", int)
    return generations


def _value(event: dict[str, Any], name: str, kind: Any) -> Any:
    """Return a value of an event; raise ValueError if it is missing or of another type."""
    value: Any = event.get(name)
    if not is_of(value, kind) or (kind is float and not abs(value) <= _MOST_SECONDS):
        raise ValueError(f"{name} of event {shown(event.get('event'))} is {shown(value)}")
    return value


def _step(event: dict[str, Any]) -> int:
    step: int = _value(event, "step", int)
    _in_range("step", step, 0, _MOST_STEPS)
    return step


def _in_range(name: str, value: float, low: float, most: float) -> None:
    if not low <= value <= most:
        raise ValueError(f"{name} is {value}")


def _lines(directory: RunDirectory) -> list[MetricsLine]:
    found = []
    for path, kept in ((directory.metrics, True), (directory.superseded_metrics, False)):
        lines = each_line(path) if path.exists() else ()
        for number, line in enumerate(lines, start=1):
            if line is None or not isinstance(line.get("step"), int):
                continue  # remnants of a crash, moved aside
            facts = {"generation": None, **line, "kept": kept}
            facts["evaluated"] = "validation_loss" in line
            try:
                found.append(checked(MetricsLine, facts))
            except ValueError as error:
                raise ValueError(f"{path.name}, line {number}: {error}") from None
    return found


def _assign(lines: list[MetricsLine], generations: list[GenerationRecord]) -> list[int]:
    """Assign lines to their generations; return the steps of lines without a generation."""
    numbered = {generation.start.generation: generation for generation in generations}
    times = list(accumulate((generation.start.time for generation in generations), max))
    strays = []
    for line in lines:
        if line.generation is None:
            number = bisect_right(times, line.time) - 1
            found = generations[number] if number >= 0 else None
        else:
            found = numbered.get(line.generation)
        if found is None:
            strays.append(line.step)
        else:
            found.lines.append(line)
    for generation in generations:
        generation.lines.sort(key=lambda line: line.step)
    return strays


def _correct_times(generations: list[GenerationRecord]) -> list[str]:
    """Convert all times to the first host's clock; return what was found out about clocks.

    The clocks of two hosts are compared by a step for which both have a time. Without one, times
    only change after a clock was set back, or after a change to a host with a slow clock: the shift
    leaves the time that is known to have passed, for a start or for steps.
    """
    clock, times, found = _Clock(), dict[int, float](), list[str]()
    host = generations[0].start.first_host if generations else ""
    for number, generation in enumerate(generations):
        start, before, back = generation.start, host, clock.set_back
        host = start.first_host
        ahead = clock.compare(start.seen, times)
        if ahead:
            found.append(
                f"generation {number}: the clock of {host} is {abs(ahead):.1f} s "
                f"{'ahead of' if ahead > 0 else 'behind'} the clock of {before}, which is left out"
            )
        seconds = max(0.0, start.seconds)
        start = replace(start, time=clock.read(start.time, seconds), seconds=seconds)
        generation.start, step = start, start.step
        # The next rank 0 may have written lines of this generation, with its own times.
        following = generations[number + 1 : number + 2]
        others = {(*seen,) for one in following for seen in one.start.seen}
        for at, line in enumerate(generation.lines):
            passed = max(0, line.step - step) * line.step_seconds
            if (line.step, line.time) in others and following[0].start.first_host != host:
                time = clock.pass_(passed)
            else:
                time = clock.read(line.time, passed)
                times[line.step] = time
            if time != line.time:
                generation.lines[at] = replace(line, time=time)
            step = line.step
        for at, time in generation.events:
            clock.now = max(clock.now, time + clock.shift) if at >= step else clock.now
        generation.last_time = clock.now
        if clock.set_back > back:
            found.append(
                f"generation {number}: a clock was set back by {clock.set_back - back:.1f} s, "
                "which is left out"
            )
    return found


class _Clock:
    """Times of one host after another, as times of the first one, which never decrease.

    Attributes:
        now: the last time.
        shift: seconds to add to a time of the present host.
        set_back: seconds by which times decreased, if each decrease is noticeable.
    """

    def __init__(self) -> None:
        self.now, self.shift, self.set_back = -math.inf, 0.0, 0.0

    def read(self, time: float, passed: float) -> float:
        """Convert a time; `passed`: known seconds since the last one."""
        if time + self.shift < self.now:
            back = self.now - time - self.shift
            self.set_back += back if back > _CLOCK_SECONDS else 0.0
            self.shift = self.now + passed - time
        self.now = time + self.shift
        return self.now

    def pass_(self, seconds: float) -> float:
        self.now += seconds
        return self.now

    def compare(self, seen: list[list[float]], times: dict[int, float]) -> float:
        """Adopt the clock of another host; return how far it is ahead of the last one's.

        Args:
            seen: (step, time) by the clock of that host.
            times: step -> its converted time.
        """
        for step, time in seen:
            if step in times:
                ahead = time + self.shift - times[int(step)]
                if abs(ahead) > _CLOCK_SECONDS:
                    self.shift -= ahead
                    return ahead
        return 0.0


def _saved(directory: RunDirectory) -> list[int]:
    return [step_of(path) for path in finished(directory.checkpoints)]


def _log_every(starts: list[dict[str, Any]], at: float, directory: RunDirectory) -> int:
    """Return train.log_every of the last launch before a time.

    Raises:
        UserError: the manifest does not contain it.
    """
    try:
        before = [start for start in starts if start["time"] <= at] or starts[:1]
        every = parse_yaml(before[-1]["config"])["train"]["log_every"]
        if not is_of(every, int) or every < 1:
            raise ValueError(f"train.log_every is {shown(every)}")
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{directory.manifest} is not in hvdtrain's format ({error})") from None
    return int(every)
