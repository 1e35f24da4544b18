"""The report that steps wait for data, given only once."""

from __future__ import annotations

import numpy as np

from hvdtrain.telemetry.straggler import COLUMNS, CONSECUTIVE, DataWatch, Table


def _table(data: float, compute: float) -> Table:
    table = np.zeros((3, len(COLUMNS)))
    table[:, COLUMNS.index("data")] = data
    table[:, COLUMNS.index("forward")] = table[:, COLUMNS.index("backward")] = compute / 2
    table[0] *= 3  # a rank that is slow in everything is not data-bound
    return table


def test_steps_that_wait_for_data_are_reported_once() -> None:
    watch = DataWatch()
    slow, fast = _table(3.0, 2.0), _table(0.1, 2.0)
    said = [watch.look(slow) for _ in range(CONSECUTIVE - 1)]
    said += [watch.look(fast)]
    assert said == [None] * CONSECUTIVE
    assert [watch.look(slow) for _ in range(CONSECUTIVE + 2)] == [None, None, 1.5, None, None]
    assert [watch.look(table) for table in (fast, slow, slow, slow, slow)] == [None] * 5


def test_steps_without_compute_are_not_reported() -> None:
    assert DataWatch().look(np.zeros((2, len(COLUMNS)))) is None
