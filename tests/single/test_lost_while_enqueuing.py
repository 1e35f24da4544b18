"""Patched Horovod: a rank dies just when the others hand their tensors over."""

from __future__ import annotations

import pytest

from tests.support.enqueuing import kill_one

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize("process_sets", [False, True])
def test_a_rank_that_enqueues_while_another_dies_waits_for_ever(process_sets: bool) -> None:
    for tenths in range(6):
        said = kill_one(0.02 + tenths / 10, 20.0, process_sets)
        assert set(said) == {"HorovodInternalError"}, f"killed after {tenths} tenths of a second"
