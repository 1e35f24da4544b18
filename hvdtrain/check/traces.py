"""What a run of a check has recorded, and the first difference between two runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hvdtrain.run_files.digests import DigestFiles

# Evaluations sum over each rank's share, and their sums are rounded.
TOLERANCE = 1e-5
OPTIONS = "the options of the optimizer's groups, such as lr"
_MOST_NAMES = 3

Line = dict[str, Any]


@dataclass(frozen=True)
class Name:
    """Something that differs.

    Args:
        kind: sample, options, value, parameter, optimizer state, buffer, object, logged or other.
        plain: the name.
        values: both values, if they are numbers.
    """

    kind: str
    plain: str
    values: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """The name, with both values."""
        if self.values is None:
            return self.plain
        ours, theirs = self.values
        return f"{self.plain} ({ours:.9g}, not {theirs:.9g})"

    @property
    def relative(self) -> float:
        """Relative difference of the values; infinite unless both are finite."""
        if self.values is None or not all(map(math.isfinite, self.values)):
            return math.inf
        ours, theirs = self.values
        return abs(ours - theirs) / max(abs(ours), abs(theirs))


@dataclass(frozen=True)
class Difference:
    """The first step at which two runs differ.

    Args:
        step: number of the step; with `starts`, of the last step before a process began.
        starts: the state with which a process began differs.
        names: what differs; what is computed first in a step comes first.
        ranks: ranks whose state differs.
        unsaved: variables and attributes outside the run's state that differ there.
    """

    step: int
    starts: bool
    names: tuple[Name, ...]
    ranks: tuple[int, ...]
    unsaved: tuple[str, ...] = ()

    @property
    def kinds(self) -> set[str]:
        return {name.kind for name in self.names}

    def of_kind(self, kind: str) -> list[Name]:
        return [name for name in self.names if name.kind == kind]

    def without(self, noise: set[str]) -> Difference:
        """Return the difference without variables that differ in any two processes."""
        return replace(self, unsaved=tuple(name for name in self.unsaved if name not in noise))

    def to_text(self) -> str:
        """Format the difference as one line."""
        first = self.names[0].kind
        shown = [name.text for name in self.names if name.kind == first]
        more = len(shown) - _MOST_NAMES
        named = ", ".join(shown[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        if not self.starts:
            where = f"step {self.step}"
        else:
            where = f"at its start after step {self.step}" if self.step else "before step 1"
        only = f", on rank {self.ranks[0]}" if self.ranks and self.ranks[0] else ""
        return f"{where}{only}: {named}"


# In the order of a step.
_KINDS = (
    *("sample", "options", "value", "parameter", "optimizer state", "buffer", "other"),
    *("object", "logged"),
)


@dataclass
class RunTrace:
    """Records of one run.

    Args:
        steps: after each step, the states of all ranks.
        starts: states with which processes began; later generations of a process are left out.
        samples: (step, micro-batch) -> samples and their digests, each time it was loaded.
    """

    steps: dict[int, list[Line]] = field(default_factory=dict)
    starts: list[Line] = field(default_factory=list)
    samples: dict[tuple[int, int], list[list[list[Any]]]] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> RunTrace:
        """Read the records of all processes of a run."""
        files, trace = DigestFiles(directory), cls()
        latest: dict[tuple[int, int], Line] = {}
        for line in files.read("state"):
            if not line["starts"]:
                latest[line["step"], line["process"]] = line
            elif all(other["process"] != line["process"] for other in trace.starts):
                trace.starts.append(line)
        for (step, _), line in sorted(latest.items(), key=lambda item: item[0][0]):
            trace.steps.setdefault(step, []).append(line)
        for line in files.read("samples"):
            place = line["step"] + 1, line["number"]
            trace.samples.setdefault(place, []).append(line["samples"])
        return trace

    @property
    def last(self) -> int:
        return max(self.steps, default=0)

    @cached_property
    def contents(self) -> dict[str, set[int]]:
        """Digest of a sample -> numbers of the samples that had it."""
        found = defaultdict[str, set[int]](set)
        for loaded in self.samples.values():
            for number, digest in (pair for pairs in loaded for pair in pairs):
                found[digest].add(number)
        return dict(found)

    def sizes(self) -> list[int]:
        """Numbers of ranks that took steps, without repetitions."""
        found: list[int] = []
        for step in sorted(self.steps):
            size = min(line["size"] for line in self.steps[step])
            found += [size] if found[-1:] != [size] else []
        return found


def first_difference(reference: RunTrace, other: RunTrace) -> Difference | None:
    """Return the first difference of a run from the run on one rank; None: there is none.

    Args:
        reference: its ranks are taken to be identical.
        other: may have begun at a later step.
    """
    events = [(line["step"], 1, [line]) for line in other.starts]
    events += [(step, 0, lines) for step, lines in other.steps.items()]
    for step, is_start, lines in sorted(events, key=lambda event: event[:2]):
        expected = _state(reference, step)
        if expected is None:
            continue
        found: dict[Name, None] = {}
        ranks = []
        if not is_start:
            found |= dict.fromkeys(sample_names(reference, other, step))
        for line in lines:
            differing = [*_differing(expected, line)]
            found |= dict.fromkeys(differing)
            ranks += [line["rank"]] if differing else []
        if found:
            names = sorted(found, key=lambda name: _KINDS.index(name.kind))
            unsaved = _unsaved(reference, other, step, lines)
            return Difference(step, bool(is_start), tuple(names), tuple(sorted({*ranks})), unsaved)
    return None


def only_rounded(reference: RunTrace, other: RunTrace) -> list[str]:
    """Names of numbers that are equal within the tolerance, and not bitwise, in some step."""
    found: dict[str, None] = {}
    for step, lines in other.steps.items():
        expected = reference.steps.get(step, [None])[0]
        if expected is None:
            continue
        for line in lines:
            values, objects = line["values"], line["objects"]
            numbers = expected["values"].items()
            found |= dict.fromkeys(n for n, v in numbers if not _equal(v, values.get(n, v)))
            contents = expected["objects"].items()
            found |= dict.fromkeys(n for n, own in contents if objects.get(n, own)[0] != own[0])
    return [*found]


def _state(trace: RunTrace, step: int) -> Line | None:
    if step in trace.steps:
        return trace.steps[step][0]
    return next((line for line in trace.starts if line["step"] == step), None)


def _differing(expected: Line, line: Line) -> Iterator[Name]:
    yield from _values(expected, line)
    for name in sorted(expected["digests"].keys() | line["digests"].keys()):
        if expected["digests"].get(name) != line["digests"].get(name):
            kinds = ("parameter", "optimizer state", "buffer")
            yield Name(next((k for k in kinds if name.startswith(f"{k} ")), "other"), name)
    for name in sorted(expected["objects"].keys() & line["objects"].keys()):
        own, theirs = expected["objects"][name], line["objects"][name]
        exact = not name.startswith("training.state")
        if name != "step.result" and not _same_content(own, theirs, exact):
            kind = "options" if name == OPTIONS else "object"
            yield Name(kind, name, _numbers(own, theirs))


def _values(expected: Line, line: Line) -> Iterator[Name]:
    exact = line.get("exact", ())
    ours, theirs = expected.get("values", {}), line.get("values", {})
    for name in [n for n in ours if n in theirs]:
        a, b = ours[name], theirs[name]
        if not (_equal(a, b) if name in exact else _close(a, b)):
            kind = "value" if name in exact else "options" if name == "lr" else "logged"
            yield Name(kind, name, (a, b))


def _same_content(own: list[Any], theirs: list[Any], exact: bool) -> bool:
    if own[0] == theirs[0]:
        return True
    if exact or own[2] != theirs[2] or own[1] is None or theirs[1] is None:
        return False
    pairs = [*zip(own[1], theirs[1], strict=False)]
    return len(own[1]) == len(theirs[1]) and all(_close(a, b) for a, b in pairs)


def _numbers(own: list[Any], theirs: list[Any]) -> tuple[float, float] | None:
    """Return the first numbers that differ, if two contents differ in numbers only."""
    if own[2] != theirs[2]:
        return None
    pairs = zip(own[1] or (), theirs[1] or (), strict=False)
    return next(((a, b) for a, b in pairs if not _equal(a, b)), None)


def sample_names(reference: RunTrace, other: RunTrace, step: int) -> list[Name]:
    """Samples of a step whose contents or numbers differ."""
    found = []
    for (of_step, number), loaded in reference.samples.items():
        if of_step != step:
            continue
        for theirs in other.samples.get((of_step, number), ()):
            for (sample, digest), (their_sample, their_digest) in zip(
                loaded[0], theirs, strict=False
            ):
                if (sample, digest) != (their_sample, their_digest):
                    found.append(Name("sample", f"the contents of sample {sample}"))
    return found


def _unsaved(reference: RunTrace, other: RunTrace, step: int, lines: list[Line]) -> tuple[str, ...]:
    """What is not saved and differs here, and not only as a result of another difference.

    In a new process it therefore has differed already when the process began, or not existed.
    """
    expected = _state(reference, step)
    assert expected is not None
    found = {
        name
        for line in lines
        for name, digest in line["unsaved"].items()
        if expected["unsaved"].get(name) != digest
    }
    for start in other.starts:
        # A variable that does not exist before the loop is computed in each step.
        own = start["unsaved"]
        found = {name for name in found if name in own or not name.startswith("variable ")}
        before = _state(reference, start["step"]) if 0 < start["step"] <= step else None
        if before is not None:
            found = {name for name in found if before["unsaved"].get(name) != own.get(name)}
    return tuple(sorted(found))


def changing_names(reference: RunTrace, repeated: RunTrace, at_start: bool = False) -> set[str]:
    """Names of what is not saved and differs between two equal runs, such as times.

    Args:
        at_start: only what differs already before the first step.
    """
    found: set[str] = set()
    pairs = [*zip(reference.starts, repeated.starts, strict=False)]
    if not at_start:
        pairs += [
            (reference.steps[step][0], lines[0])
            for step, lines in repeated.steps.items()
            if step in reference.steps
        ]
    for line, other in pairs:
        own, theirs = line["unsaved"], other["unsaved"]
        found |= {name for name in own if own[name] != theirs.get(name)}
    return found


def _equal(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)


def _close(a: float, b: float) -> bool:
    return _equal(a, b) or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE * 1e-3)
