"""`hvdtrain bench allreduce`: arithmetic, table, plot and invalid options.

tests/cluster/test_bench.py runs it on several ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.bench.allreduce import AllreduceReport, algorithm_bandwidth, bus_bandwidth
from hvdtrain.cli import main
from hvdtrain.report.bench_charts import bandwidth

MIB = 1 << 20
REPORT = AllreduceReport(
    ranks=4,
    hosts="a:2,b:2",
    seconds={
        "Horovod, Gloo": {1024: [2e-3, 4e-3, 3e-3], 32 * MIB: [0.2, 0.2, 0.1]},
        "MPI_Allreduce": {1024: [1e-3, 1e-3, 1e-3], 32 * MIB: [0.1, 0.1, 0.1]},
        "torch gloo": {1024: [6e-3, 6e-3, 6e-3], 32 * MIB: [0.1, 0.2, 0.1]},
    },
    left_out={"Horovod, MPI": "mpirun is not installed"},
)


def test_bandwidths_match_the_nccl_tests_formulas() -> None:
    assert algorithm_bandwidth(10**9, 0.5) == 2e9
    assert bus_bandwidth(10**9, 0.5, ranks=2) == 2e9  # 2 (n - 1) / n = 1
    assert bus_bandwidth(10**9, 0.5, ranks=4) == 3e9
    assert bus_bandwidth(10**9, 0.5, ranks=1) == 0


def test_ratios_are_medians_of_per_round_ratios() -> None:
    content = json.loads(REPORT.to_json())
    assert content["left_out"] == {"Horovod, MPI": "mpirun is not installed"}
    rows = {(row["side"], row["bytes"]): row for row in content["rows"]}
    small = rows["Horovod, Gloo", 1024]
    assert (small["seconds"], small["min_seconds"], small["max_seconds"]) == (3e-3, 2e-3, 4e-3)
    assert small["algbw_gb_per_s"] == pytest.approx(1024 / 3e-3 / 1e9)
    assert small["busbw_gb_per_s"] == pytest.approx(1.5 * 1024 / 3e-3 / 1e9)
    assert small["of"] == {"MPI_Allreduce": pytest.approx(1 / 3), "torch gloo": pytest.approx(2)}
    assert small["aim"] is None
    # 0.5, 1 and 1 in the rounds: the ratio of the medians would be 0.5.
    large = rows["Horovod, Gloo", 32 * MIB]
    assert large["of"] == {"MPI_Allreduce": pytest.approx(0.5), "torch gloo": pytest.approx(1)}
    assert (large["aim"], large["met"]) == (">= 0.9 x MPI_Allreduce", False)
    assert rows["MPI_Allreduce", 1024]["of"] == {}


def test_table_shows_skipped_contenders_and_missed_aims() -> None:
    head, units, *rows, left_out, last = REPORT.to_table().splitlines()
    assert head.split()[-5:] == ["/", "MPI_Allreduce", "/", "torch", "gloo"]
    assert units.split() == ["us", "us", "us", "GB/s", "GB/s", "x", "x"]
    assert len(rows) == 6
    numbers = ["3000", "2000", "4000", "0.000341", "0.000512", "0.33", "2.00"]
    assert rows[0].split() == ["1", "KiB", "Horovod,", "Gloo", *numbers]
    assert "0.50 >= 0.9 MISSED" in rows[3]
    assert left_out == "Horovod, MPI: omitted, mpirun is not installed"
    assert last.startswith("4 ranks (a:2,b:2), load ")


def test_plot_includes_every_contender() -> None:
    chart = bandwidth(REPORT.bus_bandwidths())
    assert [line["name"] for line in chart["series"]] == [*REPORT.seconds]
    assert (chart["x"], chart["unit"], chart["series"][0]["x"][-1]) == ("bytes", "GB/s", 32 << 20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sizes 1K,many", "--sizes: invalid size 'many'"),
        ("--sizes 6", "--sizes: invalid size '6'"),
        ("--sizes 1K,,2K", "--sizes: invalid size ''"),
        ("--sizes 3G", "up to 2G"),
        ("--np 3 --hosts a:1,b:1", "--hosts a:1,b:1 provides 2 of the 3 slots that --np requires"),
        ("--hosts a:x", "a host and its slots are expected"),
        ("--plot out.png", "--plot out.png: the file name must end in .html"),
        ("--plot /none/out.html", "--plot /none/out.html cannot be written"),
    ],
)
def test_invalid_option_is_a_one_line_error(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "allreduce", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("hvdtrain: error: ") and error.count("\n") == 1


@pytest.mark.parametrize("np", ["1", "two"])
def test_fewer_than_two_ranks_are_rejected(np: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "allreduce", "--np", np])
    assert ended.value.code == 2
    assert f"{np} is not an integer >= 2" in capsys.readouterr().err


def test_missing_mpirun_excludes_only_mpi_contenders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hvdtrain.bench.allreduce import missing_contenders

    monkeypatch.setenv("PATH", str(tmp_path))
    missing = missing_contenders()
    assert missing["Horovod, MPI"] == missing["MPI_Allreduce"]
    assert missing["Horovod, MPI"].startswith("mpirun is not found")
    assert "torch gloo" not in missing
