"""`make chaos`: its faults, its table and its comparison of parameters."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from tests.support.chaos import FAULTS, Outcome, difference, sequence, table


def _names(seed: int) -> list[str]:
    return [draw.name for draw in islice(sequence(seed, FAULTS), 100)]


def test_seed_determines_faults_and_covers_all_before_any_repeats() -> None:
    assert _names(7) == _names(7) != _names(8)
    assert set(_names(7)[: len(FAULTS)]) == set(FAULTS)
    guest = [name for name in _names(7) if FAULTS[name].guest is not None]
    assert guest[:4] == ["add a host", "remove a host"] * 2


def test_table_lists_count_median_and_longest_recovery_of_a_fault() -> None:
    seconds = [0.5, 3.25, 0.75]
    found = table([Outcome("stop a rank", s, 4, 3) for s in seconds], FAULTS)
    assert found.splitlines()[1].split() == [
        "stop", "a", "rank", "3", "0.75", "3.25", "4>3", "(3)"
    ]  # fmt: skip


def test_difference_is_relative_and_zero_only_if_bitwise_identical() -> None:
    wanted = {"weight": torch.tensor([4.0, 0.0]), "count": torch.tensor(3)}
    assert difference({name: t.clone() for name, t in wanted.items()}, wanted) == 0
    assert difference(wanted | {"weight": torch.tensor([4.0, 0.5])}, wanted) == 0.125
    assert 0 < difference(wanted | {"weight": torch.tensor([4.0, -0.0])}, wanted) < 1e-30
    with pytest.raises(AssertionError, match="count"):
        difference({"weight": wanted["weight"]}, wanted)
