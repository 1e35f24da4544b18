"""Numbers that describe samples, by which ranks and later starts notice that their data differ.

Two processes that build a dataset from the same files may hold different samples: labels numbered
in the order of a set, a random split without a seed, a stream that divides itself among ranks.
Comparing files does not show that; comparing samples does. samples.py makes the numbers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

# Of approximate numbers. Processors and versions of decoders differ by less, photographs by more.
_TOLERANCE = 3e-4

# By place in the sample, such as "[1]" or "['label']". Exact values, such as of integers and texts,
# are negative; approximate ones, such as of floating-point numbers and images, are not.
Values = dict[str, float]


@dataclass(frozen=True)
class SampleFacts:
    """Numbers of some samples of a dataset, as JSON.

    Args:
        fixed: by number of the sample: values that are always the same.
        seeded: by number of the sample: values that depend on random numbers, whose seed is known.
        unseeded: places of values that differ each time they are read.
    """

    fixed: dict[str, Values] = field(default_factory=dict)
    seeded: dict[str, Values] = field(default_factory=dict)
    unseeded: list[str] = field(default_factory=list)

    def differences(self, other: SampleFacts, fixed_only: bool = False) -> list[tuple[str, str]]:
        """(number of the sample, place) of the values that differ; [("0", "['label']")], say."""
        ignored = {*self.unseeded, *other.unseeded}
        parts = [(self.fixed, other.fixed)]
        if not fixed_only:
            parts.append((self.seeded, other.seeded))
        return [
            (number, place)
            for own, theirs in parts
            for number, values in own.items()
            for place, value in values.items()
            if place not in ignored and differ(value, theirs.get(number, {}).get(place, value))
        ]

    def differs_from(self, other: SampleFacts, fixed_only: bool = False) -> str:
        """The first sample and place that differ, such as "sample 0 [1]"; "": none."""
        return "".join(described(*found) for found in self.differences(other, fixed_only)[:1])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SampleFacts:
        return cls(**json.loads(text))


def described(number: str, place: str) -> str:
    """A place in a sample, for messages."""
    return f"sample {number} {place}".rstrip()


def differ(one: float, other: float) -> bool:
    """Whether two values of one place are not those of the same data."""
    if one < 0 or other < 0:
        return one != other
    return abs(one - other) > _TOLERANCE * max(1.0, one, other)
