"""Samples in JSON lines, Parquet files and tar shards, and their indexes."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hvdtrain.data import index as index_module
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig, DataConfig, LoaderConfig
from hvdtrain.data.images import Reading, shards
from hvdtrain.data.index import build_indexes, index_path, open_indexes
from hvdtrain.data.loader import Loading, TrainLoader
from hvdtrain.data.order import sample_order
from hvdtrain.data.packed import read_text
from hvdtrain.data.parquet import PARQUET, ParquetRows
from hvdtrain.data.records import JSON_LINES, JsonLines, TarShards, scan_lines
from hvdtrain.data.text import Tokenizer
from hvdtrain.data.tokenize import Source, tokenize
from hvdtrain.errors import UserError
from hvdtrain.launch.commands import mpirun
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.runtime.mesh import Group
from hvdtrain.runtime.mpi import Alone
from hvdtrain.tasks.image import ImageDataConfig, ImageTaskConfig
from hvdtrain.tasks.language_model import LanguageModel, LanguageModelConfig


def _lines(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def _tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as shard:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))
    return path


def _parquet(path: Path, start: int, count: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = list(range(start, start + count))
    table = pa.table({"n": numbers, "text": [f"document {n}" for n in numbers]})
    pq.write_table(table, path, row_group_size=7)
    return path


def test_json_lines_are_read_once_and_in_order(tmp_path: Path) -> None:
    for file, count in enumerate([5, 1, 30]):
        _lines(tmp_path / f"{file}.jsonl", [{"at": [file, i], "ü": "\n" * i} for i in range(count)])
    (tmp_path / "3.jsonl").write_bytes(b'\n\r\n{"at": [3, 0]}\r\n\n\n{"at": [3, 1]}')
    data = JsonLines([str(tmp_path)])
    assert [tuple(row["at"]) for row in data] == [
        *((0, i) for i in range(5)), (1, 0), *((2, i) for i in range(30)), (3, 0), (3, 1),
    ]  # fmt: skip
    assert len(data) == 38 and data[35]["ü"] == "\n" * 29


@settings(deadline=None)
@given(
    lines=st.lists(st.sampled_from(["", "\r", "a", "bb\r", "ccc"]), max_size=9),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    newline=st.booleans(),
)
def test_scanning_a_file_in_chunks_finds_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cuts: list[int], newline: bool
) -> None:
    content = "\n".join(lines).encode() + b"\n" * newline
    if not content:
        return
    path = tmp_path_factory.mktemp("lines") / "a"
    path.write_bytes(content)
    borders = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    found = [scan_lines(path, a, b).tolist() for a, b in pairwise(borders)]
    starts = [0, *(i + 1 for i, byte in enumerate(content) if byte == ord("\n"))]
    full = [i for i in starts if content[i:].split(b"\n")[0].strip(b"\r")]
    assert [*chain(*found)] == full


def test_parquet_rows_are_read_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdtrain.data.parquet._CACHE_BYTES", 100)  # contains one row group or none
    for file, count in enumerate([20, 0, 7, 3]):
        _parquet(tmp_path / f"{file}.parquet", 100 * file, count)
    data = ParquetRows([str(tmp_path)], columns=["n"])
    expected = [*range(20), *range(200, 207), *range(300, 303)]
    assert [data[i] for i in reversed(range(len(data)))] == [{"n": n} for n in reversed(expected)]
    assert set(ParquetRows([str(tmp_path)])[0]) == {"n", "text"}


def test_workers_read_data_that_their_rank_has_opened(tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet", 0, 30)
    _lines(tmp_path / "a.jsonl", [{"n": n} for n in range(30)])
    for data in (ParquetRows([str(tmp_path)], ["n"]), JsonLines([str(tmp_path)])):
        assert data[20] == {"n": 20}
        loading = Loading(LoaderConfig(2))
        assignment = Assignment(3, Group(0, 1))
        loader = TrainLoader(data, 0, BatchConfig(30, 10), assignment, seed=1, loading=loading)
        found = [n for batch in loader.next_step(0) for n in batch["n"].tolist()]
        loader.close()
        assert found == sample_order(0, 30, 30, seed=1).tolist()


def test_tar_samples_have_all_their_members(tmp_path: Path) -> None:
    long = "d" * 120  # its name needs a separate header
    _tar(tmp_path / "0.tar", [("a/1.png", b"x" * 700), ("a/1.cls", b"3"), ("b/1.png", b"")])
    _tar(tmp_path / "1.tar", [(f"{long}/2.Seg.PNG", b"y"), (f"{long}/2.cls", b"4")])
    found = list(TarShards([f"{tmp_path}/*.tar"]))  # type: ignore[call-overload]
    for sample in found:
        sample.pop("__shard__")
    assert found == [
        {"__key__": "a/1", "png": b"x" * 700, "cls": b"3"},
        {"__key__": "b/1", "png": b""},
        {"__key__": f"{long}/2", "seg.png": b"y", "cls": b"4"},
    ]


def test_index_is_reused_until_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = _lines(tmp_path / "a.jsonl", [{"n": 1}, {"n": 2}])
    assert len(JsonLines([str(path)])) == 2
    monkeypatch.setattr(index_module, "_whole", None)  # no index can be created
    assert len(JsonLines([str(path)])) == 2
    monkeypatch.undo()
    _lines(path, [{"n": 1}, {"n": 2}, {"n": 3}])
    with caplog.at_level(logging.INFO):
        assert [row["n"] for row in JsonLines([str(path)])] == [1, 2, 3]
    assert "has changed since its index was built" in caplog.text
    index_path(path, None).write_bytes(b"broken")
    assert len(JsonLines([str(path)])) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.jsonl.index.npy", "a.jsonl"]


def test_read_only_data_is_indexed_in_a_cache_or_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = [_lines(tmp_path / f"{f}/a.jsonl", [{"n": f}] * (f + 1)) for f in (0, 1)]
    cached = [len(i) - 1 for i in open_indexes(files, JSON_LINES, str(tmp_path / "cache" / "x"))]
    assert cached == [1, 2] and not list(tmp_path.glob("[01]/.*"))

    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")  # root can write everywhere, so this is mocked

    monkeypatch.setattr(index_module, "_write", refused)
    assert [len(i) - 1 for i in open_indexes(files, JSON_LINES)] == [1, 2]
    assert "its index cannot be stored (Read-only file system)" in caplog.text


@pytest.mark.slow
def test_ranks_build_the_same_indexes_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys, hvdtrain.data.index as index, hvdtrain.cli as cli\n"
        "index._PIECE_BYTES = 512\n"
        "sys.exit(cli.main(['data', 'index', '--input', *sys.argv[1:]]))\n"
    )
    for directory in ("alone", "shared"):
        _lines(tmp_path / directory / "big.jsonl", [{"n": "x" * (i % 50)} for i in range(400)])
        _parquet(tmp_path / directory / "a.parquet", 0, 30)
        _tar(tmp_path / directory / "a.tar", [("1.cls", b"1"), ("2.cls", b"2")])
    command = [sys.executable, "-c", program]
    for directory, np_ in (("alone", 1), ("shared", 3)):
        own = [*command, str(tmp_path / directory)]
        done = subprocess.run(
            own if np_ == 1 else mpirun(np_, own),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("indexes built: 1") == 3  # one rank reports it
    indexes = [sorted((tmp_path / directory).glob(".*")) for directory in ("alone", "shared")]
    assert [len(found) for found in indexes] == [3, 3]
    for own, other in zip(*indexes, strict=True):
        assert np.array_equal(np.load(own)[3:], np.load(other)[3:])
    opened = tmp_path / "shared" / "big.jsonl"
    assert build_indexes([opened], JSON_LINES, None, Alone()) == 0
    monkeypatch.setattr(index_module, "_whole", None)
    assert len(JsonLines([str(opened)])) == 400


def _cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda f: JsonLines([str(_lines(f / "a.jsonl", [{"a": 1}] * 3 + [{"b": 1}]))])[9],
            None,
        ),
        (
            lambda f: _broken_line(f, "[1]\n"),
            r"a\.jsonl: line 4 is not a JSON object \(it is a",
        ),
        (
            lambda f: _broken_line(f, '{"a": 1, "b'),
            r"a\.jsonl: line 4 is not a JSON object \(Un",
        ),
        (
            lambda f: ParquetRows([str(_cut(_parquet(f / "a.parquet", 0, 50), 900))]),
            r"a\.parquet is not a complete Parquet file \(Parquet magic bytes not found",
        ),
        (
            lambda f: ParquetRows([str(_parquet(f / "a.parquet", 0, 5))], ["label"]),
            r"a\.parquet has no column 'label', but n, text",
        ),
        (
            lambda f: TarShards([str(_cut(_tar(f / "a.tar", [("1.cls", b"1" * 2000)]), 1000))]),
            r"a\.tar is not a complete tar file \(unexpected end of data\)",
        ),
        (
            lambda f: TarShards([str(_cut(_tar(f / "a.tar", [("1.cls", b"1")]), 1024))]),
            r"a\.tar is not a complete tar file \(its end is missing\)",
        ),
        (lambda f: TarShards([str(f / "*.tar")]), r"TarShards: no file matches"),
        (
            lambda f: JsonLines([str(_tar(f / "a.tar", []))]),
            r"a\.tar is not a file of JSON lines \(\*\.jsonl, \*\.ndjson\)",
        ),
    ],
)
def test_invalid_data_or_index_raises_a_clear_error(
    tmp_path: Path, make: Callable[[Path], object], message: str | None
) -> None:
    with pytest.raises(IndexError if message is None else UserError, match=message):
        make(tmp_path)


def _broken_line(directory: Path, line: str) -> object:
    path = _lines(directory / "a.jsonl", [{"a": 1}] * 3)
    path.write_text(path.read_text() + line)
    data = JsonLines([str(path)])
    assert data[2] == {"a": 1}
    return data[3]


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_each_row_is_one_document_with_a_separator(tmp_path: Path, source: str) -> None:
    texts = [f"document {n}" for n in range(10)]
    if source == "parquet":
        _parquet(tmp_path / "a.parquet", 0, 10)
    else:
        _lines(tmp_path / "a.jsonl", [{"text": text, "id": 1} for text in texts])
    config = DataConfig(source, [str(tmp_path)], validation_fraction=0.1)
    train, validation = read_text(config, Tokenizer(None))
    assert (
        np.concatenate([train, validation]).tobytes() == "".join(f"{t}\0" for t in texts).encode()
    )
    written = tokenize(Source([str(tmp_path)], None, 0.1, source), tmp_path / "out", Alone())
    assert [np.fromfile(path, "<u2").tolist() for path in written] == [
        train.tolist(), validation.tolist(),
    ]  # fmt: skip
    model = GPTConfig(context=8)
    task = LanguageModel(LanguageModelConfig(model, config))
    windows, held_out, *_ = task.datasets()
    assert windows[0].tolist() == list(b"document 0\0document 1")[:9] and held_out is not None
    config = DataConfig(source, [str(tmp_path)], text_key="body")
    with pytest.raises(UserError, match=r"has no (column )?'?body"):
        read_text(config, Tokenizer(None))


def _shard(path: Path, count: int, **broken: bytes) -> Path:
    members = []
    for number in range(count):
        content = io.BytesIO()
        Image.new("RGB", (9, 12), (25 * number, 0, 0)).save(content, "png")
        cls = broken.get("cls", str(number % 3).encode()) if number == 4 else str(number % 3)
        image = broken.get("png", content.getvalue()) if number == 4 else content.getvalue()
        label = cls if isinstance(cls, bytes) else cls.encode()
        members += [(f"{number:04}.png", image), (f"{number:04}.cls", label)]
    return _tar(path, members)


def test_image_shards_keep_their_labels_and_are_split_without_overlap(tmp_path: Path) -> None:
    _shard(tmp_path / "0.tar", 6)
    _shard(tmp_path / "1.tar", 4)
    data = shards(f"{tmp_path}/*.tar", None, 0.2, 8, Reading(3))
    assert (len(data.train), len(data.validation)) == (8, 2)  # type: ignore[arg-type]
    found = [part[i] for part in (data.train, data.validation) for i in range(len(part))]  # type: ignore[arg-type]
    seen = sorted((int(image[0, 4, 4]) // 25, label) for image, label in found)
    assert seen == sorted((n, n % 3) for count in (6, 4) for n in range(count))
    assert found[0][0].shape == (3, 9, 9)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"png": b"no image"}, r"^image 0004 of .*a\.tar cannot be read \("),
        (
            {"cls": b"cat"},
            r"^sample 0004 of .*a\.tar: its \.cls is not a class number, but 'cat'$",
        ),
        (
            {"cls": b"7"},
            r"^sample 0004 .*is of class 7, but image\.classes 3 means classes 0 to 2$",
        ),
    ],
)
def test_broken_sample_of_a_shard_is_named(
    tmp_path: Path, broken: dict[str, bytes], message: str
) -> None:
    path = _shard(tmp_path / "a.tar", 6, **broken)
    data = shards(str(path), str(path), 0.2, 8, Reading(3))
    with pytest.raises(UserError, match=message):
        [data.train[i] for i in range(6)]


def test_shards_of_several_splits_are_refused(tmp_path: Path) -> None:
    """As megatron-energon lists them: all shards of a dataset may lie in one directory."""
    for number in range(12):
        _tar(tmp_path / f"data/shard_{number:02}.tar", [("1.cls", b"1")])
    splits = tmp_path / ".nv-meta/split.yaml"
    splits.parent.mkdir()
    text = "split_parts:\n  train: ['data/shard_{00..09}.tar', data/shard_11.tar]\n"
    splits.write_text(f"{text}  val: [data/shard_10.tar]\n  test: []\nexclude: []\n")
    with pytest.raises(UserError, match=r"has the splits train and val .* data/shard_00\.tar"):
        TarShards([str(tmp_path)])
    assert len(TarShards([f"{tmp_path}/data/shard_0*.tar"])) == 10
    assert len(TarShards([f"{tmp_path}/data/shard_10.tar"])) == 1
    splits.write_text(f"{text}exclude: [data/shard_03.tar/7]\n")
    with pytest.raises(UserError, match=r"excludes data/shard_03\.tar/7: name other shards"):
        TarShards([f"{tmp_path}/data/shard_0*.tar"])
    splits.write_text("split_parts: 3\n")
    with pytest.raises(UserError, match=r"split\.yaml is not megatron-energon's"):
        TarShards([f"{tmp_path}/data/shard_0*.tar"])


def test_tar_shards_require_the_number_of_classes() -> None:
    with pytest.raises(ValueError, match=r"needs image\.classes"):
        ImageTaskConfig(data=ImageDataConfig(train="a/*.tar"))
    with pytest.raises(ValueError, match=r"both be directories, or both tar shards"):
        ImageDataConfig(train="a/*.tar", validation="b")


def test_changed_parquet_file_is_indexed_again(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "a.parquet", 0, 10)
    assert open_indexes([path], PARQUET)[0].tolist() == [0, 7, 10]
    _parquet(path, 0, 20)
    assert len(ParquetRows([str(path)])) == 20
