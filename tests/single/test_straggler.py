"""Straggler detection, and micro-batches moved away from slow ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.engine.callbacks.stragglers import Speeds
from hvdtrain.runtime.mesh import Grid
from hvdtrain.telemetry.straggler import COLUMNS, CONSECUTIVE, StragglerWatch, Table, own_seconds
from hvdtrain.telemetry.straggler import scores as scores_on

Row = dict[str, float]


def _row(
    data: float = 0.01,
    compute: float = 0.06,
    checkpoint: float = 0.0,
    comm: float = 0.01,
    micro_batches: int = 4,
    waited: float = 0.0,
) -> Row:
    return {
        **{"data": data, "forward": compute / 3, "backward": compute / 3},
        **{"optimizer": compute / 3, "checkpoint": checkpoint, "comm_exposed": comm},
        "waited_in_passes_seconds": waited,
        **{"wall_seconds": data + compute + checkpoint + comm, "micro_batches": micro_batches},
    }


def _table(*rows: Row) -> Table:
    return np.array([[row.get(name, 0.0) for name in COLUMNS] for row in rows])


def _plain(ranks: int) -> Grid:
    return Grid(tuple(range(ranks)), {})


def scores(table: Table) -> Table:
    return scores_on(table, _plain(len(table)))


WELL = [_row(), _row(), _row()]


def _last(watch: StragglerWatch, rows: list[Row], times: int) -> list[tuple[int, bool, str]]:
    for _ in range(times - 1):
        assert watch.look(_table(*rows)) == [], "said too early"
    return [(v.ranks[0], v.slow, v.kind) for v in watch.look(_table(*rows))]


def test_slow_rank_is_named_once_with_its_phase() -> None:
    for kind, slow in {
        "data": _row(data=0.08),
        "compute": _row(compute=0.13),
        "checkpoint": _row(checkpoint=0.07),
    }.items():
        watch = StragglerWatch(0.75, _plain(3))
        assert watch.look(_table(*WELL)) == []
        assert _last(watch, [*WELL[:2], slow], CONSECUTIVE) == [(2, True, kind)]
        assert watch.slow == {2: kind}
        assert _last(watch, [*WELL[:2], slow], 5) == []
        assert _last(watch, WELL, CONSECUTIVE) == [(2, False, kind)]
        assert watch.slow == {}


def test_slowness_of_fewer_comparisons_is_tolerated() -> None:
    watch = StragglerWatch(0.75, _plain(3))
    for _ in range(5):
        assert _last(watch, [*WELL[:2], _row(compute=0.2)], CONSECUTIVE - 1) == []
        assert watch.look(_table(*WELL)) == []


def test_slowness_of_a_few_short_steps_is_tolerated() -> None:
    quick = _row(data=0, compute=0.002, comm=0.003)
    watch, rows = StragglerWatch(0.75, _plain(2)), [quick, _row(data=0, compute=0.005, comm=0)]
    assert _last(watch, rows, CONSECUTIVE) == []
    assert _last(watch, rows, 38 - CONSECUTIVE) == []  # 0.19 s
    assert [found for _ in range(5) for found in watch.look(_table(*rows))], "after 0.2 s"


def test_low_score_that_costs_the_others_no_time_is_tolerated() -> None:
    quick = [_row(data=0, compute=0.001, comm=0.1), _row(data=0, compute=0.003, comm=0.098)]
    assert scores(_table(*quick))[1] < 0.5
    assert _last(StragglerWatch(0.75, _plain(2)), quick, CONSECUTIVE + 1) == []


def test_score_accounts_for_the_number_of_micro_batches() -> None:
    uneven = [_row(0.01, 0.06, micro_batches=2), _row(0.015, 0.08, micro_batches=3)]
    assert scores(_table(*uneven)).min() > 0.75
    idle = _row(0, 0, micro_batches=0)
    assert scores(_table(*uneven, idle))[2] == 1.0
    assert np.isnan(own_seconds(_table(*uneven, idle), _plain(3))[2]).any()
    assert scores(_table(idle)).tolist() == [1.0]


def _said(watch: StragglerWatch, *rows: Row) -> list[tuple[tuple[int, ...], int | None, str]]:
    """Return whom it reports for repeated identical tables."""
    verdicts = [v for _ in range(CONSECUTIVE) for v in watch.look(_table(*rows))]
    assert all(verdict.slow for verdict in verdicts)
    return [(v.ranks, v.stage, v.kind) for v in verdicts]


PIPELINE = Grid((0, 1, 2, 3), {"pipeline": 2})
WAITS = _row(comm=0.06)  # ranks of the other stage


def test_busy_pipeline_stage_is_named_instead_of_its_ranks() -> None:
    busy = _row(compute=0.12)
    slow = StragglerWatch(0.75, PIPELINE)
    assert _said(slow, WAITS, busy, WAITS, busy) == [((1, 3), 1, "compute")]
    assert slow.slow == {1: "compute", 3: "compute"}
    assert scores_on(_table(WAITS, busy, WAITS, busy), PIPELINE).tolist() == [1.0] * 4
    alone = Grid((0, 1), {"pipeline": 2})
    assert _said(StragglerWatch(0.75, alone), WAITS, busy) == [((1,), 1, "compute")]


def test_slow_rank_of_a_pipeline_is_named_instead_of_its_stage() -> None:
    found = _said(StragglerWatch(0.75, PIPELINE), WAITS, _row(compute=0.13), WAITS, _row())
    assert found == [((1,), None, "compute")]
    # The first stage has little work, and one of its ranks is slow in it.
    rows = _row(compute=0.05), _row(compute=0.055), _row(compute=0.03), _row(compute=0.055)
    assert _said(StragglerWatch(0.75, PIPELINE), *rows)[0] == ((0,), None, "compute")


def test_ranks_waiting_within_their_passes_are_not_named() -> None:
    """One of two ranks that split each matrix loads slowly: the other waits in its passes."""
    tensor = Grid((0, 1), {"tensor": 2})
    loads, waits = _row(data=0.07), _row(compute=0.12)
    assert _said(StragglerWatch(0.75, tensor), waits, loads) == [((1,), None, "data")]
    # Two ranks that share sequences take equally long for their passes, and one mostly waits.
    busy = _row(compute=0.16)
    context = Grid((0, 1), {"context": 2})
    measured = [_row(compute=0.16, waited=0.1), _row(compute=0.16, waited=0.01)]
    assert _said(StragglerWatch(0.75, context), *measured) == [((1,), None, "compute")]
    two = Grid((0, 1, 2, 3), {"tensor": 2})
    assert _said(StragglerWatch(0.75, two), _row(), _row(), busy, busy) == [
        ((2, 3), None, "compute")
    ]


TIMES = st.one_of(st.just(0.0), st.floats(1e-6, 10.0))
ROWS = st.lists(
    st.builds(_row, TIMES, TIMES, TIMES, TIMES, st.integers(0, 9)), min_size=1, max_size=9
)


@given(ROWS)
def test_scores_are_in_range_and_the_fastest_rank_is_never_slow(rows: list[Row]) -> None:
    found = scores(_table(*rows))
    assert ((found > 0) & (found <= 1)).all()
    assert found.max() == 1.0
    watch = StragglerWatch(0.75, _plain(len(rows)))
    verdicts = [verdict for _ in range(CONSECUTIVE) for verdict in watch.look(_table(*rows))]
    assert all(found[verdict.ranks[0]] < 0.75 and verdict.slow for verdict in verdicts)
    assert watch.slow == {verdict.ranks[0]: verdict.kind for verdict in verdicts}


def test_persistently_slow_rank_gets_fewer_micro_batches() -> None:
    slow = _row(data=0.02, compute=0.12)
    speeds = Speeds()
    assert speeds.look(_table(*WELL[:2], slow), [4, 4, 4]) is None
    assert speeds.look(_table(*WELL), [4, 4, 4]) is None
    assert speeds.look(_table(*WELL[:2], slow), [4, 4, 4]) == [5, 5, 2]
    done = [_row(micro_batches=5), _row(micro_batches=5), _row(micro_batches=2)]
    for _ in range(2 * CONSECUTIVE):
        assert speeds.look(_table(*done), [5, 5, 2]) is None
    speeds = Speeds()
    for _ in range(2 * CONSECUTIVE):
        assert speeds.look(_table(*WELL[:2], _row(compute=0.065)), [4, 4, 4]) is None
        assert speeds.look(_table(*WELL, _row(micro_batches=0)), [4, 4, 4, 0]) is None
