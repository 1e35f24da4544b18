"""The task `tabular`: file reading, statistics, codes, metrics, and errors for invalid input."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import subprocess
from codecs import BOM_UTF8
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from hvdtrain.config import parse
from hvdtrain.data import tables
from hvdtrain.data.table_encoding import (
    MISSING,
    SPECIAL,
    UNSEEN,
    Columns,
    Wanted,
    encode,
    offsets,
    scan,
    sizes,
)
from hvdtrain.data.tables import Table, open_table, read_cells
from hvdtrain.errors import UserError
from hvdtrain.launch.commands import mpirun
from hvdtrain.models.tabgpt import TabGPT, TableShape
from hvdtrain.process.data import build_data
from hvdtrain.runtime.mpi import Alone
from hvdtrain.tasks.tabular import Tabular, of_classes, of_numbers
from hvdtrain.tasks.tabular_data import buffers, open_training, read_columns, share_borders
from tests.support import warm
from tests.support.datasets import KEYS, sales, write
from tests.support.thread_ranks import exchange, on_ranks

FEATURES = ("day", "cost", "colour", "shop", "number", "country")
_BORDERS = tables._borders
WANTED = Wanted(FEATURES, "sold", "day", 0.2)


def _scan(path: Path, wanted: Wanted = WANTED) -> Columns:
    return scan(open_table("data.train", [path], []), wanted, Alone())


def _rows(flags: list[str]) -> tuple[Tabular, torch.Tensor, torch.Tensor]:
    """Return the task, and the training and validation rows' labels."""
    task, datasets = build_data(parse([*KEYS, *flags]))
    assert isinstance(task, Tabular)
    train, validation = datasets.train, datasets.validation
    return task, train.tensors[2], validation.tensors[2]  # type: ignore[attr-defined, union-attr]


# --- files --------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [37, 1000, 1 << 20])
def test_csv_lines_across_chunk_boundaries_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    table = sales(300)
    whole = open_table("k", [write(table, tmp_path / "t.parquet")], ["number"])
    monkeypatch.setattr(tables, "_PART_BYTES", part_bytes)
    file = write(table, tmp_path / "t.csv")
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    parts = open_table("k", [file], ["number"])
    assert parts.kinds == whole.kinds and (part_bytes > 1000 or len(parts.parts) > 10)
    for name in ("cost", "day.month", "day.weekday", "price"):
        np.testing.assert_allclose(_read(parts, name), _read(whole, name))
    for name in ("colour", "shop", "number", "sold"):
        assert _read(parts, name) == _read(whole, name), name


@pytest.mark.parametrize("part_bytes", [50, 3000])
def test_line_breaks_in_quoted_cells_are_read_at_any_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    draw = random.Random(0)
    pieces = ['"', "\n", ",", "\r\n", "a", "word ", '"",', '\n"']
    texts = ["".join(draw.choices(pieces, k=draw.randrange(9))) for _ in range(600)]
    texts += ["a\nlong cell " * 99, '5" pipe']
    rows = [[n, f"x{text}", f'{text}"' if n % 2 else "y"] for n, text in enumerate(texts)]
    monkeypatch.setattr(tables, "_PART_BYTES", part_bytes)
    monkeypatch.setattr(tables, "_TAIL_BYTES", 20)
    monkeypatch.setattr(tables, "_CHUNK_BYTES", 30)
    file = tmp_path / "t.csv"
    for quoting, start in ((csv.QUOTE_ALL, b""), (csv.QUOTE_MINIMAL, BOM_UTF8)):
        with open(file, "w", newline="") as opened:
            csv.writer(opened, quoting=quoting).writerows([["n", "a\n,b", "c"], *rows])
        file.write_bytes(start + file.read_bytes())
        table = open_table("k", [file], [])
        assert len(table.parts) > (file.stat().st_size // part_bytes) // 2
        assert _read(table, "n") == [row[0] for row in rows]
        assert [_read(table, name) for name in ("a\n,b", "c")] == [
            [row[column] for row in rows] for column in (1, 2)
        ]


def test_quoted_cell_without_an_end_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text('n,text\n1,"two\nlines"\n2,"no end\n3,x\n')
    with pytest.raises(
        UserError, match=rf"^{file}: cannot be read .the quote in line 4 has no end"
    ):
        open_table("k", [file], [])


class _Rank:
    """One of three ranks, which are threads."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def run(self, part: Any) -> Any:
        return part()

    def gather(self, value: Any) -> list[Any]:
        return exchange("columns", json.loads(json.dumps(value)))

    def abort(self) -> None:
        raise AssertionError


def test_each_csv_file_is_read_whole_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"{number}.csv" for number in range(5)]
    for file in files:
        write(sales(), file)
    config = parse([*KEYS, "--data.train", str(tmp_path)]).task_config
    read: list[Path] = []
    monkeypatch.setattr(tables, "_borders", lambda file: read.append(file) or _BORDERS(file))

    def load(rank: int) -> Columns | str:
        try:
            borders = share_borders(config, _Rank(rank))
            return scan(*open_training(config, borders, _Rank(rank)), _Rank(rank))
        except UserError as error:
            return str(error)

    found = on_ranks([partial(load, rank) for rank in range(3)])
    assert sorted(read) == files
    assert found == 3 * [scan(*open_training(config, {}, Alone()), Alone())]
    files[4].write_text('n,text\n1,"two\n')
    [message] = {*on_ranks([partial(load, rank) for rank in range(3)])}
    assert "4.csv: cannot be read (the quote in line 2 has no end)" in str(message)


def test_rows_are_read_for_types_in_the_first_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write(sales(), tmp_path / f"{number}.csv") for number in range(3)]
    ranges: list[Path] = []
    read = tables._range
    monkeypatch.setattr(tables, "_range", lambda file, *r: ranges.append(file) or read(file, *r))
    open_table("k", files, [])
    assert ranges == [files[0], *files]  # the first rows, and each header


def test_borders_of_another_file_are_not_used(tmp_path: Path) -> None:
    file = write(sales(), tmp_path / "t.csv")
    for known in ({}, {str(file): [0, 10, 20]}):
        assert len(_read(open_table("k", [file], [], known), "number")) == len(sales())


def test_table_of_another_format_is_named(tmp_path: Path) -> None:
    write(sales(), tmp_path / "t.csv")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress((tmp_path / "t.csv").read_bytes()))
    with pytest.raises(UserError, match=r"t.csv.gz is not a table .*compressed with gzip: decompr"):
        _rows(["--data.train", str(tmp_path / "t.csv.gz")])
    (tmp_path / "t.csv").write_text((tmp_path / "t.csv").read_text(), encoding="utf-16")
    with pytest.raises(UserError, match=r"data.train: .*t.csv is UTF-16 text: convert it"):
        _rows(["--data.train", str(tmp_path / "t.csv")])
    (tmp_path / "t.parquet").write_bytes((tmp_path / "t.csv.gz").read_bytes())
    with pytest.raises(UserError, match=r"t.parquet is compressed with gzip: decompress it"):
        _rows(["--data.train", str(tmp_path / "t.parquet")])


def _read(table: Table, name: str) -> list[Any]:
    """Return a column over all parts."""
    found: list[Any] = []
    for part in table.parts:
        cells = read_cells(table, part, [name.partition(".")[0]])
        texts = cells.categories.get(name)
        found += cells.numbers[name].tolist() if texts is None else texts.to_pylist()
    return found


def test_missing_cells_stay_missing_and_dates_keep_their_day(tmp_path: Path) -> None:
    text = "when,name,n\n2024-02-29T23:59:00Z,NA,\n2024-03-04T00:01:00Z,x,2.5\n"
    file = tmp_path / "t.csv"
    file.write_text(text)
    table = open_table("k", [file], [])
    cells = read_cells(table, table.parts[0], ["when", "name", "n"])
    assert cells.categories["name"].to_pylist() == [None, "x"]
    np.testing.assert_array_equal(cells.numbers["n"], [np.nan, 2.5])
    found = {name: values.tolist() for name, values in cells.numbers.items() if "when" in name}
    assert found == {
        "when.year": [2024, 2024], "when.month": [2, 3], "when.day": [29, 4],
        "when.weekday": [3, 0], "when.hour": [23, 0], "when.minute": [59, 1],
    }  # fmt: skip


# --- statistics ---------------------------------------------------------------


def test_statistics_cover_exactly_the_training_rows(tmp_path: Path) -> None:
    table = sales()
    columns = _scan(write(table, tmp_path / "t.parquet"))
    assert columns.constant == ["country"] and columns.cut is not None
    moments = np.asarray(table["day"].cast("timestamp[us]").cast("int64"))
    train = table.filter(pa.array(moments < columns.cut))
    assert columns.rows == len(train) and 0.7 * 600 < columns.rows < 0.85 * 600
    by_name = {column.name: column for column in columns.features}
    cost = by_name["cost"]
    known = np.asarray(train["cost"].drop_null())
    assert cost.missing == train["cost"].null_count > 0
    assert (cost.smallest, cost.largest) == (known.min(), known.max())
    assert (cost.mean, cost.deviation) == pytest.approx((known.mean(), known.std()))
    below = [(known < edge).mean() for edge in cost.edges]
    assert len(below) == 64 and np.abs(np.diff(below) - 1 / 63).max() < 0.01
    assert by_name["number"].edges == [1000, 1001, 1002, 1003, 1004]
    shops = Counter(train["shop"].to_pylist())
    assert 0 < shops["rare"] < 10 and "new" not in shops
    assert by_name["shop"].categories == [n for n, _ in shops.most_common() if n != "rare"]
    assert by_name["shop"].rare == 1
    assert columns.label is not None and sorted(columns.label.categories) == ["no", "yes"]


@pytest.mark.slow
def test_statistics_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    write(sales(20_000), tmp_path / "t.parquet", rows=700)
    write(sales(20_000), tmp_path / "t.csv")
    for name in ("t.parquet", "t.csv"):
        out = tmp_path / "columns.json"
        command = [warm.python(3), "-m", "hvdtrain.cli", "data", "columns", "--out", str(out)]
        command += ["--", *KEYS[2:], "--data.train", str(tmp_path / name)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            mpirun(3, command), capture_output=True, text=True, timeout=120, check=False, env=env
        )
        assert done.returncode == 0 and done.stdout.count("rows/s") == 1, done.stderr
        assert out.read_text() == _scan(tmp_path / name).to_json()


# --- codes --------------------------------------------------------------------


def test_codes_and_fractions_decode_to_the_original_cells(tmp_path: Path) -> None:
    file = write(sales(), tmp_path / "t.parquet", rows=1000)
    columns = _scan(file)
    table = open_table("k", [file], [])
    cells = read_cells(table, table.parts[0], FEATURES)
    unseen: Counter[str] = Counter()
    codes, fractions = encode(columns.features, cells, np.ones(600, bool), unseen)
    assert (fractions >= 0).all() and (fractions <= 1).all()
    bounds = zip(columns.features, offsets(columns.features), sizes(columns.features), strict=True)
    for place, (column, offset, size) in enumerate(bounds):
        own = codes[:, place] - offset
        assert (own >= 0).all() and (own < size).all()
        if column.kind == "number":
            values = cells.numbers[column.name]
            edges = np.asarray([*column.edges, column.edges[-1]])
            lower = np.where(own == MISSING, 0, own - SPECIAL)
            width = edges[lower + 1] - edges[lower]
            back = np.where(own == MISSING, np.nan, edges[lower] + fractions[:, place] * width)
            expected = np.clip(values, column.edges[0], column.edges[-1])
            np.testing.assert_allclose(back, expected, rtol=1e-5)
        else:
            names = [None, "?", "", *column.categories]
            texts = cells.categories[column.name].to_pylist()
            known = {None, *column.categories}
            assert [names[code] for code in own] == [t if t in known else "?" for t in texts]
            assert unseen[column.name] == int((own == UNSEEN).sum())
    assert unseen["shop"] > 10 and unseen["colour"] == 0


def test_prediction_is_continuous_at_bin_edges() -> None:
    torch.manual_seed(0)
    model = TabGPT([6, 5], TableShape(1, 8, 2, 0.0), 1, {}).eval()
    codes = torch.tensor([[3, 6], [4, 6], [4, 6]])
    fractions = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.5, 0.0]])
    found = model.predict(codes, fractions)
    assert torch.allclose(found[0], found[1]) and not torch.allclose(found[1], found[2])


def test_labels_are_not_features_and_unlabeled_rows_are_omitted(tmp_path: Path) -> None:
    table = sales()
    file = write(table, tmp_path / "t.parquet")
    task, train, validation = _rows(["--data.train", str(file)])
    assert len(train) + len(validation) == 600 - table["sold"].null_count
    assert not torch.cat((train, validation)).isnan().any()
    assert task._data is not None
    names = {column.name for column in task._data.columns.features}
    assert names == {
        "day.year", "day.month", "day.day", "day.weekday", "cost", "colour", "shop", "number",
    }  # fmt: skip
    notes = " | ".join(task._data.notes)
    assert "training rows have no sold and are omitted" in notes
    assert "in the validation rows" in notes and "of shop" in notes and "country" in notes
    _, every, _ = _rows(["--data.train", str(file), "--tabular.objective", "pretraining"])
    assert len(every) == task._data.columns.rows
    _, few, same = _rows(["--data.train", str(file), "--tabular.label_fraction", "0.1"])
    assert len(few) == round(0.1 * len(train)) and torch.equal(same, validation)


def test_columns_are_restored_from_a_model_or_a_json_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = write(sales(), tmp_path / "t.parquet")
    columns = _scan(file)
    save_file(buffers(columns), tmp_path / "model.safetensors")
    (tmp_path / "columns.json").write_text(columns.to_json())
    for name in ("model.safetensors", "columns.json"):
        found = read_columns(tmp_path / name)
        assert found.features == columns.features and found.label == columns.label
    # A table with few rows is read with statistics of many.
    few = write(sales().slice(0, 50), tmp_path / "few.parquet")
    flags = ["--data.train", str(few), "--tabular.columns", str(tmp_path / "columns.json")]
    task, _, _ = _rows(flags)
    assert task._data is not None and task._data.columns.features == columns.features


# --- metrics ------------------------------------------------------------------


def test_auc_rmse_and_r2_equal_scikit_learn() -> None:
    from sklearn.metrics import r2_score, roc_auc_score, root_mean_squared_error

    draw = np.random.default_rng(1)
    labels = (draw.random(500) < 0.3).astype(float)
    scores = np.round(draw.normal(labels, 2.0), 1)  # with ties
    found = of_classes(torch.from_numpy(np.stack((scores, labels), axis=1)))
    assert found["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert of_classes(torch.tensor([[0.3, 1.0], [0.1, 1.0]])) == {}
    numbers = of_numbers(torch.from_numpy(np.stack((scores, labels), axis=1)))
    assert numbers["rmse"] == pytest.approx(root_mean_squared_error(labels, scores))
    assert numbers["r2"] == pytest.approx(r2_score(labels, scores))


# --- errors ------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tabular.label buyer", "tabular.label: no column 'buyer'; the columns are day, cost"),
        ("--tabular.ignore colr", "tabular.ignore: no column 'colr'"),
        ("--tabular.split_by shop", "tabular.split_by: column shop is neither a number nor a date"),
        ("--tabular.split_by country", "column country is neither a number"),
        (
            "--tabular.objective regression",
            "tabular.label: sold is not a number; .* class",
        ),
        ("--tabular.label country", "tabular.label: country is here in all rows"),
        ("--tabular.columns {path}/no.json", "tabular.columns: .*no.json: No such file"),
        (
            "--tabular.columns {path}/t.json",
            "t.json has no columns: it is neither a file of `hvd",
        ),
    ],
)
def test_key_that_does_not_fit_the_table_is_named(tmp_path: Path, flags: str, message: str) -> None:
    file = write(sales(), tmp_path / "t.parquet")
    (tmp_path / "t.json").write_text(json.dumps({"a": 1}))
    more = flags.format(path=tmp_path).split()
    with pytest.raises(UserError, match=message):
        _rows(["--data.train", str(file), *more])


def test_unknown_validation_label_or_missing_column_is_refused(tmp_path: Path) -> None:
    train = write(sales(), tmp_path / "train.parquet")
    table = sales(100)
    sold = pc.fill_null(table["sold"], "perhaps")
    other = write(table.set_column(7, "sold", sold), tmp_path / "validation.parquet")
    keys = [key for key in KEYS if key not in ("--tabular.split_by", "day")]
    flags = ["--data.train", str(train), "--data.validation", str(other)]
    message = "validation.parquet: sold is perhaps, which is not one of the classes .* .no, yes."
    with pytest.raises(UserError, match=message):
        build_data(parse([*keys, *flags]))
    missing = write(table.drop_columns(["shop"]), tmp_path / "missing.parquet")
    with pytest.raises(UserError, match=r"data.validation: column 'shop' of data.train is missing"):
        build_data(parse([*keys, *flags[:2], "--data.validation", str(missing)]))


@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
def test_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    file = write(sales(), tmp_path / name)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 - 4])
    with pytest.raises(UserError, match=f"^{file}: cannot be read .*: repair or remove it"):
        _rows(["--data.train", str(file)])


def test_file_with_invalid_cells_columns_or_suffix_is_named(tmp_path: Path) -> None:
    first = write(sales(), tmp_path / "a.csv")
    lines = first.read_text().splitlines()
    lines[300] = lines[300].replace(lines[300].split(",")[4], "many")
    second = tmp_path / "b.csv"
    second.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"b.csv: cannot be read \(.*invalid value 'many'\)"):
        _rows(["--data.train", str(tmp_path / "*.csv")])
    write(sales().rename_columns(["tag", *sales().column_names[1:]]), second)
    with pytest.raises(UserError, match=r"column 'day' is in .*a.csv, but not in .*b.csv"):
        _rows(["--data.train", str(tmp_path / "*.csv")])
    with pytest.raises(UserError, match=r"data.train: .*c.txt is not a table \("):
        (tmp_path / "c.txt").write_text("x")
        _rows(["--data.train", str(tmp_path / "c.txt")])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data.train t.csv", "tabular.label: name the column that classification predicts"),
        ("--data.train t.csv --tabular.label x", "select the validation rows: set either"),
        ("--data.validation t.csv", "data.validation needs data.train"),
        ("--tabular.width 30", "tabular.width 30 is not a multiple of tabular.heads 4"),
        ("--tabular.mask 1", r"tabular.mask must lie in \(0, 1\)"),
    ],
)
def test_invalid_key_is_refused(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(["--task", "tabular", *flags.split()])
