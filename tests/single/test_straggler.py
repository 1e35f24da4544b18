"""Who is called slow, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.telemetry.straggler import PATIENCE, StragglerWatch, Window, own_seconds, scores
from hvdtrain.telemetry.timers import PHASES


def _window(
    data: float = 0.01,
    compute: float = 0.06,
    checkpoint: float = 0.0,
    comm: float = 0.01,
    micro_batches: int = 4,
) -> Window:
    seconds = dict.fromkeys(PHASES, 0.0)
    parts = {"data": data, "forward": compute / 3, "backward": compute / 3}
    seconds |= {**parts, "optimizer": compute / 3, "checkpoint": checkpoint, "comm_exposed": comm}
    wall = data + compute + checkpoint + comm
    return Window(seconds, wall, comm, 0, micro_batches, 0, 0)


WELL = [_window(), _window(), _window()]


def _last(watch: StragglerWatch, windows: list[Window], times: int) -> list[tuple[int, bool, str]]:
    for _ in range(times - 1):
        assert watch.look(windows) == [], "said too early"
    return [(v.rank, v.slow, v.kind) for v in watch.look(windows)]


def test_a_slow_rank_is_not_named_or_with_the_wrong_phase_or_again_and_again() -> None:
    for kind, slow in {
        "data": _window(data=0.08),
        "compute": _window(compute=0.13),
        "checkpoint": _window(checkpoint=0.07),
    }.items():
        watch = StragglerWatch(0.75)
        assert watch.look(WELL) == []
        assert _last(watch, [*WELL[:2], slow], PATIENCE) == [(2, True, kind)]
        assert watch.slow == {2: kind}
        assert _last(watch, [*WELL[:2], slow], 5) == []
        assert _last(watch, WELL, PATIENCE) == [(2, False, kind)]
        assert watch.slow == {}


def test_one_slow_exchange_makes_a_straggler() -> None:
    watch = StragglerWatch(0.75)
    for _ in range(5):
        assert _last(watch, [*WELL[:2], _window(compute=0.2)], PATIENCE - 1) == []
        assert watch.look(WELL) == []


def test_a_rank_is_called_slow_that_costs_the_others_nothing() -> None:
    quick = [_window(data=0, compute=0.001, comm=0.1), _window(data=0, compute=0.003, comm=0.098)]
    assert scores(quick)[1] < 0.5
    assert _last(StragglerWatch(0.75), quick, PATIENCE + 1) == []


def test_a_rank_with_more_micro_batches_is_called_slow() -> None:
    uneven = [_window(0.01, 0.06, micro_batches=2), _window(0.015, 0.08, micro_batches=3)]
    assert scores(uneven) > [0.75, 0.75]
    idle = [*uneven, _window(0, 0, micro_batches=0)]
    assert scores(idle)[2] == 1.0 and own_seconds(idle)[2] is None
    assert scores([idle[2]]) == [1.0]


TIMES = st.floats(0.0, 10.0)
WINDOWS = st.builds(_window, TIMES, TIMES, TIMES, TIMES, st.integers(0, 9))


@given(st.lists(WINDOWS, min_size=1, max_size=9))
def test_a_score_leaves_its_range_or_names_the_fastest(windows: list[Window]) -> None:
    found = scores(windows)
    assert all(0 < score <= 1 for score in found)
    assert max(found) == 1.0
    watch = StragglerWatch(0.75)
    for _ in range(PATIENCE):
        watch.look(windows)
    assert all(found[rank] < 0.75 for rank in watch.slow)


@given(WINDOWS)
def test_a_window_changes_on_its_way_to_the_other_ranks(window: Window) -> None:
    assert Window.from_list(window.to_list()) == window
