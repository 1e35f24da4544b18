"""Patched Horovod: a rank dies while the other ranks enqueue tensors."""

from __future__ import annotations

import pytest

from tests.support.enqueuing import kill_one

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize("process_sets", [False, True])
def test_all_reduce_raises_if_peer_dies_during_enqueue(process_sets: bool) -> None:
    for tenths in range(6):
        said = kill_one(0.02 + tenths / 10, 20.0, process_sets)
        assert set(said) == {"HorovodInternalError"}, f"killed after {tenths} tenths of a second"
