"""Optimizers, schedules and layers of third parties in a script's own loop; most are in
tests/soak/third_parties.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.third_parties import plain, runs

# Of packages that the tests' environment has.
PARTS = [
    *("Adafactor", "ASGD", "Lookahead(AdamW)", "ScheduleFreeWrapper(AdamW)", "TRAC(AdamW)"),
    *("SOAP", "AdaFactor", "Ranger21", "StableSPAM", "SPAM", "Shampoo", "Kron (PSGD)", "AggMo"),
    *("Prodigy", "AdamW8bit", "SequentialLR", "AveragedModel, SWALR", "REXScheduler"),
    *("weight_norm", "orthogonal", "FakeQuantize with observer", "ResidualVQ", "Rearrange, EinMix"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> runs.End:
    [end] = runs.whole(tmp_path_factory.mktemp("whole"), PARTS)
    return end


def check(ends: list[runs.End], expected: runs.End) -> None:
    differ = {part: runs.difference(ends, expected, part) for part in PARTS}
    assert differ == dict.fromkeys(PARTS, 0.0)


def test_parts_continue_bitwise_in_a_resumed_run(tmp_path: Path, whole: runs.End) -> None:
    check(runs.resumed(tmp_path, PARTS), whole)


def test_parts_train_bitwise_the_same_on_three_ranks(tmp_path: Path, whole: runs.End) -> None:
    ends = runs.whole(tmp_path, PARTS, "gloo:3")
    assert len(ends) == 3
    check(ends, whole)


def test_parts_continue_bitwise_when_a_rank_is_replaced(tmp_path: Path, whole: runs.End) -> None:
    ends = runs.replaced(tmp_path, PARTS)
    assert len(ends) == 3
    check(ends, whole)


def test_differences_of_parts_are_found() -> None:
    expected = {"Rprop": plain.end_of("Rprop")}
    assert runs.difference([expected], expected, "Rprop") == 0
    changed = {
        name: tensor + (name == "learning rates") for name, tensor in expected["Rprop"].items()
    }
    assert runs.difference([expected, {"Rprop": changed}], expected, "Rprop") == 1
