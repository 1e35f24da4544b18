"""Arrow files, written by `datasets` and pyarrow."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pytest

from hvdtrain.data.arrow import ArrowRows
from hvdtrain.data.config import DataConfig
from hvdtrain.data.packed import read_text
from hvdtrain.data.text import Tokenizer
from hvdtrain.errors import UserError
from tests.support.ranged_http import serving

ROWS = [
    {"text": f"document {number}", "doc": {"body": f"body {number}"}, "number": number}
    for number in range(1000)
]


def saved(directory: Path, rows: Any = ROWS, shards: int = 3, **more: Any) -> datasets.Dataset:
    found = datasets.Dataset.from_list(rows)
    found.save_to_disk(str(directory), num_shards=shards, **more)
    return datasets.load_from_disk(str(directory))


def jsonl(file: Path, rows: Any = ROWS) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_rows_are_those_of_load_from_disk(tmp_path: Path) -> None:
    oracle = saved(tmp_path / "saved")
    rows = ArrowRows([str(tmp_path / "saved")])
    assert [rows[number] for number in range(len(rows))] == list(oracle)
    assert rows.shard_samples.tolist() == [334, 333, 333]
    assert rows.where(334).endswith("data-00001-of-00003.arrow: row 1")
    assert [*ArrowRows([str(tmp_path / "saved")], ["number"])[7]] == ["number"]
    with pytest.raises(IndexError):
        _ = rows[1000]


def test_shuffled_and_selected_datasets_are_saved_in_their_order(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).shuffle(seed=1).select(range(100)).save_to_disk(
        str(tmp_path / "saved")
    )
    oracle = datasets.load_from_disk(str(tmp_path / "saved"))
    rows = ArrowRows([str(tmp_path / "saved")])
    assert [rows[number] for number in range(len(rows))] == list(oracle) and len(rows) == 100


def test_results_of_map_in_the_directory_are_not_data(tmp_path: Path) -> None:
    loaded = saved(tmp_path / "saved")
    loaded.map(lambda row: {"text": "from the cache"})
    names = {path.name for path in (tmp_path / "saved").glob("*.arrow")}
    assert any(name.startswith("cache-") for name in names), "datasets has stored none"
    rows = ArrowRows([str(tmp_path / "saved")])
    assert len(rows) == 1000 and rows[999]["text"] == "document 999"
    train, _ = read_text(DataConfig("arrow", [str(tmp_path / "saved")]), Tokenizer(None))
    assert b"from the cache" not in train.tobytes()


def test_splits_of_a_dataset_dict_are_not_mixed(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS).train_test_split(0.1, seed=0)
    whole.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match=r"saved has the splits test, train: name one"):
        ArrowRows([str(tmp_path / "saved")])
    assert len(ArrowRows([str(tmp_path / "saved/train")])) == 900


def test_relative_paths_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    assert len(ArrowRows(["saved"])) == len(ArrowRows(["saved/*.arrow"])) == 1000
    monkeypatch.chdir(tmp_path / "saved")
    assert len(ArrowRows(["."])) == len(ArrowRows(["*.arrow"])) == 1000
    datasets.Dataset.from_list(ROWS).train_test_split(0.1).save_to_disk("splits")
    with pytest.raises(UserError, match="splits has the splits test, train: name one"):
        ArrowRows(["splits"])
    monkeypatch.chdir(tmp_path / "saved/splits")
    with pytest.raises(UserError, match=r"\. has the splits test, train: name one, such as train"):
        ArrowRows(["train", "test"])


def test_missing_file_of_a_dataset_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    (tmp_path / "saved/data-00001-of-00003.arrow").unlink()
    with pytest.raises(UserError, match=r"saved: data-00001-of-00003\.arrow of state\.json is mis"):
        ArrowRows([str(tmp_path / "saved")])


def test_splits_and_caches_behind_urls_are_not_mixed(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS).train_test_split(0.1, seed=0)
    whole.save_to_disk(str(tmp_path / "saved"))
    datasets.load_from_disk(str(tmp_path / "saved/train")).map(lambda row: {"text": "cached"})
    system = fsspec.filesystem("memory")
    for path in (tmp_path / "saved").rglob("*.*"):
        name = path.relative_to(tmp_path).as_posix()
        system.pipe_file(f"/arrow/{name}", path.read_bytes())
    with pytest.raises(UserError, match=r"saved has the splits test, train: name one"):
        read_text(DataConfig("arrow", ["memory://arrow/saved"]), Tokenizer(None))
    train, _ = read_text(DataConfig("arrow", ["memory://arrow/saved/train"]), Tokenizer(None))
    assert b"cached" not in train.tobytes() and b"document" in train.tobytes()


@pytest.mark.parametrize("kind", ["new_file", "new_stream"])
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_files_and_streams_of_pyarrow_are_read(
    tmp_path: Path, kind: str, compression: str | None, dictionary: bool
) -> None:
    table = pa.table({"text": [f"document {number % 9}" for number in range(1000)]})
    if dictionary:
        table = pa.table({"text": table["text"].dictionary_encode()})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with getattr(pa.ipc, kind)(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
        for batch in table.to_batches(max_chunksize=64):
            writer.write_batch(batch)
    rows = ArrowRows([str(tmp_path)])
    assert [rows[number] for number in range(len(rows))] == table.to_pylist()


@pytest.mark.parametrize("key", ["text", "doc.body"])
def test_text_is_that_of_the_same_json_lines(tmp_path: Path, key: str) -> None:
    saved(tmp_path / "saved", shards=1)
    parts = [
        read_text(DataConfig(source, [str(path)], text_key=key), Tokenizer(None))
        for source, path in (("arrow", tmp_path / "saved"), ("jsonl", jsonl(tmp_path / "a.jsonl")))
    ]
    assert [part.tolist() for part in parts[0]] == [part.tolist() for part in parts[1]]


def test_text_behind_a_url_is_read_and_rows_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "saved", shards=1)
    (file,) = (tmp_path / "saved").glob("data*.arrow")
    with serving() as server:
        server.files["/a.arrow"] = file.read_bytes()
        url = server.url("/a.arrow")
        train, _ = read_text(DataConfig("arrow", [url]), Tokenizer(None))
        assert train.tobytes().startswith(b"document 0\0document 1\0")
        with pytest.raises(UserError, match=r"a\.arrow: rows of Arrow files are read from local"):
            ArrowRows([url])


def test_dataset_can_be_passed_to_another_process_without_its_rows(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    rows = ArrowRows([str(tmp_path / "saved")])
    content = pickle.dumps(rows)
    assert len(content) < 2000
    assert pickle.loads(content)[500] == rows[500]


def test_fingerprint_changes_with_the_rows(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    saved(tmp_path / "b")
    saved(tmp_path / "c", [{**row, "number": 0} for row in ROWS])
    prints = [ArrowRows([str(tmp_path / name)]).fingerprint() for name in "abc"]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("column", r"has no column 'body', but text, doc, number"),
        ("truncated", r"is not a complete Arrow file \(.*copy it again"),
        ("parquet", r"is a Parquet file: name it"),
        ("null", r"row 8 has null for 'text'"),
    ],
)
def test_file_that_cannot_be_read_is_refused_with_the_reason(
    tmp_path: Path, case: str, message: str
) -> None:
    rows = [{**row, "text": None} if row["number"] == 7 else row for row in ROWS]
    saved(tmp_path / "saved", rows if case == "null" else ROWS, shards=1)
    (file,) = (tmp_path / "saved").glob("data*.arrow")
    if case == "truncated":
        file.write_bytes(file.read_bytes()[:20_000])
    elif case == "parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(str(file))
    key = "body" if case == "column" else "text"
    with pytest.raises(UserError, match=message):
        read_text(DataConfig("arrow", [str(tmp_path / "saved")], text_key=key), Tokenizer(None))
