"""`make dev-bench ARGS=layouts`: aims, references, coverage and failed layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf

import pytest

from hvdtrain.bench.processes import MARK
from hvdtrain.errors import UserError
from hvdtrain.parallel.config import AXES
from tests.soak.bench import layouts as module
from tests.soak.bench.__main__ import main
from tests.soak.bench.layouts import LAYOUTS, Where, layouts, ranks_of
from tests.soak.bench.layouts_report import Curve, LayoutsReport, Row


def _curve(*losses: float) -> Curve:
    return Curve(losses, [1.0] * len(losses), [], [0.01] * len(losses))


WANTED = _curve(4.0, 2.0)


@pytest.mark.parametrize(
    ("found", "wanted", "aim", "difference"),
    [
        (_curve(4.0, 2.00001), WANTED, 1e-5, 5e-6),
        (_curve(4.0, 2.00004), WANTED, 1e-5, 2e-5),
        (_curve(4.0, 2.0), WANTED, 0.0, 0.0),
        (_curve(4.0, 2.0000000001), WANTED, 0.0, 5e-11),
        (_curve(4.0, float("nan")), WANTED, 1e-5, inf),
        (_curve(4.0), WANTED, 1e-5, inf),
        ("a rank died", WANTED, 1e-5, inf),
        (_curve(4.0, 2.0), None, 0.0, inf),
    ],
)
def test_layout_with_different_losses_misses_its_aim(
    found: Curve | str, wanted: Curve | None, aim: float, difference: float
) -> None:
    row = Row("tensor 2", 2, found, wanted, aim)
    assert row.differences()["losses"] == pytest.approx(difference, rel=1e-3)
    assert row.met == (difference <= aim)
    report = LayoutsReport([row], {"steps": 2})
    assert ("MISSED" in report.to_table()) != row.met
    assert json.loads(report.to_json())["rows"][0]["met"] == row.met


def test_layouts_cover_every_axis_pair_and_number_of_ranks() -> None:
    assert len(set(LAYOUTS)) == len(LAYOUTS) >= 20
    assert {ranks_of(layout) for layout in LAYOUTS} == {2, 4, 8, 16}
    axes = [frozenset(a for a in (*AXES, "data") if a in layout) for layout in LAYOUTS]
    every = {frozenset((a, b)) for a in (*AXES, "data") for b in (*AXES, "data")}
    assert every <= set(axes)  # a pair with one name is the axis alone


class _Ranks:
    """Replacement of started ranks, on which each of these layouts fails."""

    def __init__(self, *failing: str) -> None:
        self._failing = failing
        self.starts: list[int] = []

    def __call__(self, command: Sequence[str]) -> tuple[int, list[str]]:
        # In the command, because mpirun does not forward an environment to another host.
        assert "OMP_NUM_THREADS=1" in command
        flags = [argument for argument in command if argument.startswith("[")]
        self.starts.append(len(flags))
        lines = []
        for own in flags:
            if any(key.replace("shard=", "shard.degree=") in own for key in self._failing):
                return 1, [*lines, "0: ValueError: no such thing", "mpirun noticed"]
            lines.append(f"0: {MARK}{json.dumps(vars(WANTED))}}}")
        return 0, lines


def test_failed_layout_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _Ranks("shard=2")
    monkeypatch.setattr(module, "attempt", ranks)
    chosen = ["data 2", "shard 2", "tensor 2", "data 2 x zero 1", "tensor 16"]
    report = layouts([], 2, Where(4, None, "gloo"), chosen)
    assert ranks.starts == [1, 4, 2]  # one rank alone; all of one size; the remaining ones
    assert [row.name for row in report.rows] == chosen[:-1]
    assert [row.met for row in report.rows] == [True, False, True, True]
    assert "shard 2: ValueError: no such thing" in report.to_table()
    assert [row.aim for row in report.rows] == [1e-5, 1e-5, 1e-5, 0.0]


def test_missed_aim_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["layouts", "--layout", "tensor 2", "--layout", "shard 2"]
    monkeypatch.setattr(module, "attempt", _Ranks("shard"))
    assert main(command) == 1
    assert "2 layouts, 1 missed the aim" in capsys.readouterr().out
    monkeypatch.setattr(module, "attempt", _Ranks())
    assert main(command) == 0


def test_malformed_layout_is_rejected() -> None:
    with pytest.raises(UserError, match="--layout tensor: write it as 'data 2 x tensor 2'"):
        ranks_of("tensor")
    with pytest.raises(UserError, match="the degree of an axis is a number"):
        ranks_of("tensor two")
