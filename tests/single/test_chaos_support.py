"""The sequence of faults of `make chaos`, and its table."""

from __future__ import annotations

from itertools import islice

from tests.support.chaos import FAULTS, Outcome, sequence, table


def _names(seed: int) -> list[str]:
    return [draw.name for draw in islice(sequence(seed, list(FAULTS)), 200)]


def test_a_seed_gives_another_sequence_of_faults_or_one_that_cannot_be() -> None:
    assert _names(7) == _names(7) != _names(8)
    assert set(_names(7)) == set(FAULTS)
    guest = [name for name in _names(7) if FAULTS[name].guest is not None]
    assert guest[:4] == ["add a host", "remove a host"] * 2


def test_the_table_leaves_out_a_fault_or_its_longest_recovery() -> None:
    seconds = [0.5, 3.25, 0.75]
    found = table([Outcome("stop a rank", s, 4, 3) for s in seconds])
    assert found.splitlines()[1].split() == [
        "stop", "a", "rank", "3", "0.75", "3.25", "4>3", "(3)"
    ]  # fmt: skip
