"""Fingerprints of large files depend on content, not on where or when it was copied."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from hvdtrain.data import files
from hvdtrain.data.files import of_files
from hvdtrain.data.parquet import ParquetRows
from hvdtrain.data.records import JsonLines

NAME = "the fingerprint of the training data"


def _lines(directory: Path, answer: str = "a") -> str:
    directory.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": "p", "answer": answer if n == 50 else "a"}) for n in range(100)]
    (directory / "chats.jsonl").write_text("\n".join(lines))
    return JsonLines([str(directory / "chats.jsonl")]).fingerprint()


def _rows(directory: Path, answer: str = "a") -> str:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    directory.mkdir(exist_ok=True)
    table = pa.table({"answer": [answer if n == 50 else "a" for n in range(100)]})
    parquet.write_table(table, directory / "rows.parquet")
    return ParquetRows([str(directory / "rows.parquet")]).fingerprint()


@pytest.mark.parametrize("make", [_lines, _rows])
def test_fingerprint_depends_on_content_and_not_on_timestamps(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    found = make(tmp_path / "here")
    assert len(found) == 16 and make(tmp_path / "there") == found
    for path in (tmp_path / "there").iterdir():
        os.utime(path, (1, 1))
    shutil.copytree(tmp_path / "here", tmp_path / "copied")
    assert make(tmp_path / "copied") == found
    assert make(tmp_path / "here", "b") != found, "as many lines of as many bytes"


def test_fingerprint_of_large_files_reads_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{n}.jsonl" for n in range(3)]
    for path in paths:
        with open(path, "wb") as file:
            file.truncate(1 << 40)  # a terabyte of zeros
    read = []
    monkeypatch.setattr(os, "pread", lambda *args, real=os.pread: read.append(args) or real(*args))
    before = of_files(paths, [1, 1, 1])
    assert sum(size for _, size, _ in read) <= 64 << 20
    for path, place in ((paths[0], 0), (paths[1], (1 << 40) - 1)):  # its ends are always read
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x")
        after = of_files(paths, [1, 1, 1])
        assert after != before
        before = after
    monkeypatch.setattr(files, "_BLOCKS", 2)  # with more files than blocks, the ends of files
    assert of_files(paths, [1, 1, 1]) != of_files(paths[:2], [1, 1])
