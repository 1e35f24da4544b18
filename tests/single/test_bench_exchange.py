"""`hvdtrain bench exchange`: arithmetic, table, plot and invalid options.

tests/cluster/test_bench.py runs it on several ranks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hvdtrain.bench.exchange import Curve, ExchangeReport, parse_strategies, read_curve
from hvdtrain.cli import main
from hvdtrain.exchange.config import STRATEGIES
from hvdtrain.report.bench_charts import losses
from hvdtrain.run_files.run_directory import RunDirectory


def _curve(step: float, loss: float = 20.0, sent: float = 8e6, validation: float = 2.5) -> Curve:
    """Return a curve of 20 steps: the loss falls by 1 per step, warm-up steps are ten times as
    slow."""
    seconds = [10 * step * min(n, 10) + step * max(0, n - 10) for n in range(1, 21)]
    return Curve(seconds, [loss - n for n in range(1, 21)], sent, validation)


FACTS = {"ranks": 2, "hosts": "a:1,b:1", "launcher": "gloo", "rounds": 3}
REPORT = ExchangeReport(
    FACTS,
    curves={
        "dense": [_curve(0.2), _curve(0.4), _curve(0.3)],
        "topk": [_curve(0.1, 25, 4e4, 3), _curve(0.4, 25, 4e4, 3), _curve(0.1, 25, 4e4, 3)],
    },
    alone=[0.1, 0.1, 0.15],
)


def test_step_time_excludes_warm_up() -> None:
    assert _curve(0.2).step_seconds == pytest.approx(0.2)


def test_loss_at_a_time_averages_the_last_ten_completed_steps() -> None:
    curve = _curve(0.1)
    assert curve.seconds[14] == pytest.approx(10.5)
    assert curve.loss_at(10.55) == curve.loss_after(15) == pytest.approx(9.5)  # steps 6 to 15
    assert curve.loss_at(3.5) == curve.loss_after(3) == 18.0  # of fewer, all
    assert math.isnan(curve.loss_at(0.5))
    assert curve.smoothed()[2] == (pytest.approx(3.0), 18.0)


def test_strategies_are_compared_per_round_at_equal_steps_and_time() -> None:
    content = json.loads(REPORT.to_json())
    assert content["launcher"] == "gloo" and content["steps"] == 20
    assert content["equal_seconds"] == pytest.approx(11)  # 11, 44 and 11
    alone, dense, topk = content["rows"]
    assert [row["side"] for row in content["rows"]] == ["no exchange", "dense", "topk"]
    times = [dense[f"{key}step_seconds"] for key in ("", "min_", "max_")]
    assert times == pytest.approx([0.3, 0.2, 0.4])
    # 2, 4 and 2 in the rounds: the ratio of the medians would be 3.
    assert dense["of"] == {"no exchange": pytest.approx(2)}
    assert topk["of"] == {"no exchange": pytest.approx(1), "dense": pytest.approx(0.5)}
    assert (dense["sent_bytes"], topk["sent_bytes"]) == (8e6, 4e4)
    # Steps 11 to 20; when the faster strategy ended, dense had done 5 steps, 20 and 3.
    assert (dense["loss"], topk["loss"]) == (4.5, 9.5)
    assert (dense["loss_at_equal_seconds"], topk["loss_at_equal_seconds"]) == (17.0, 9.5)
    assert (dense["validation_loss"], topk["validation_loss"]) == (2.5, 3)
    for key in ("sent_bytes", "loss", "loss_at_equal_seconds", "validation_loss"):
        assert alone[key] is None
    assert alone["of"] == {}


def test_table_lists_every_strategy_and_blanks_nonfinite_losses() -> None:
    curves = {**REPORT.curves, "topk": [_curve(0.1, math.nan, 4e4, math.nan)] * 3}
    report = ExchangeReport(FACTS, curves, REPORT.alone)
    head, units, alone, dense, topk, last = report.to_table().splitlines()
    assert head.endswith("sent  step 20  at 11 s  validation")
    assert units.split()[-4:] == ["MB/step", "loss", "loss", "loss"]
    assert alone.split() == ["no", "exchange", "100", "100", "150", *"------"]
    losses = ["4.5000", "18.0000", "2.5000"]  # 5, 2 and 3 steps were done by 11 s
    assert dense.split() == ["dense", "300", "200", "400", "2.000", "-", "8", *losses]
    assert topk.split() == ["topk", "100", "100", "100", "1.000", "0.333", "0.04", *"---"]
    assert last.startswith("ranks 2, hosts a:1,b:1, launcher gloo, rounds 3, load ")
    assert json.loads(report.to_json())["rows"][2]["loss"] is None  # JSON has no NaN


def test_ratios_use_only_requested_strategies() -> None:
    report = ExchangeReport(FACTS, {"topk": REPORT.curves["topk"]}, REPORT.alone)
    assert "dense" not in report.to_table()
    assert set(report.rows()[1]["of"]) == {"no exchange"}


def test_plot_includes_every_strategy() -> None:
    chart = losses({name: found[0].smoothed() for name, found in REPORT.curves.items()})
    assert [line["name"] for line in chart["series"]] == [*REPORT.curves]
    assert chart["x"] == "seconds" and chart["note"].startswith("Mean of 10 steps")
    many = {f"side {number}": _curve(0.1).smoothed() for number in range(12)}
    lines = losses(many)["series"]
    assert len({(line["color"], line["dash"]) for line in lines}) == len(many)


def test_curve_reads_times_losses_and_sent_bytes_of_a_run(tmp_path: Path) -> None:
    lines = [
        {"step": n, "loss": 9.0 - n / 10 if n != 2 else None, "time": 100 + n, "step_seconds": 0.5}
        for n in range(1, 26)
    ]
    lines[-1]["validation_loss"] = 3.25
    # 10 excluded steps; 10 of 40 and 60 bytes on the two ranks, 5 of 30 on each.
    exchanges = [
        {"step": 10, "steps": 10, "bytes": [9000, 9000]},
        {"step": 20, "steps": 10, "bytes": [400, 600]},
        {"step": 25, "steps": 5, "bytes": [150, 150]},
    ]
    for name, content in (("metrics", lines), ("ranks", exchanges)):
        text = "".join(json.dumps(line) + "\n" for line in content)
        (tmp_path / f"{name}.jsonl").write_text(text)
    curve = read_curve(RunDirectory(tmp_path))
    assert curve.seconds[:2] == [0.5, 1.5]
    assert curve.step_seconds == 1.0
    assert curve.sent == pytest.approx((500 + 150) / 15)
    assert math.isnan(curve.losses[1]) and curve.losses[24] == 6.5
    assert curve.validation_loss == 3.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--strategies dense,zip",
            f"--strategies: unknown strategy 'zip'; choose from {', '.join(STRATEGIES)}",
        ),
        ("--strategies dense,", "--strategies: unknown strategy ''; choose from dense"),
        ("--steps 19", "--steps 19: the first 10 steps are excluded"),
        ("--np 3 --hosts a:1,b:1", "--hosts a:1,b:1 provides 2 of the 3 slots that --np requires"),
        ("--np 3", "8 micro-batches cannot be shared evenly among 3 ranks"),
        ("--preset gpt-nanu", "no preset"),
        ("--plot out.png", "--plot out.png: the file name must end in .html"),
        ("-- --exchange.wire=float16", "exchange.wire float16: the strategies set this key"),
        ("-- --exchange.ratio=2", "exchange.ratio must be in (0, 1], not 2"),
        ("-- --run.root=/dev/null/x", "run.root /dev/null/x cannot be written: Not a directory"),
    ],
)
def test_invalid_option_is_a_one_line_error(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "exchange", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("hvdtrain: error: ") and error.count("\n") == 1


def test_missing_mpirun_is_reported_at_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "exchange", "--launcher", "mpi"]) == 2
    assert "--launcher mpi: mpirun is not found" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--np 1", "--launcher tcp", "--rounds 0"])
def test_option_out_of_range_is_a_usage_error(arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "exchange", *arguments.split()])
    assert ended.value.code == 2


def test_duplicate_strategies_are_measured_once() -> None:
    assert parse_strategies("topk, dense,topk") == ["topk", "dense"]
