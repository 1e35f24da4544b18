"""Numbers that describe samples, by which ranks and later starts notice that their data differ.

Two processes that build a dataset from the same files may hold different samples: labels numbered
in the order of a set, a random split without a seed, a stream that divides itself among ranks.
Comparing files does not show that; comparing samples does. samples.py makes the numbers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

# Processors and versions of decoders differ by less, two photographs by more.
_TOLERANCE = 3e-4

Values = dict[str, float]  # by place in the sample, such as "[1]" or "['label']"


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

    def differs_from(self, other: SampleFacts, fixed_only: bool = False) -> str:
        """The first sample and place that differ, such as "sample 0 [1]"; "": none."""
        parts = [(self.fixed, other.fixed)]
        if not fixed_only:
            parts.append((self.seeded, other.seeded))
        for own, theirs in parts:
            for number, values in own.items():
                others = theirs.get(number, {})
                for place, value in values.items():
                    unseeded = place in self.unseeded or place in other.unseeded
                    if not unseeded and _differ(value, others.get(place, value)):
                        return f"sample {number} {place}".rstrip()
        return ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SampleFacts:
        return cls(**json.loads(text))


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > _TOLERANCE * max(1.0, abs(one), abs(other))
