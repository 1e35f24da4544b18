"""Compressed files of JSON lines and tar shards, written by the formats' own libraries."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
import multiprocessing
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import zstandard

from hvdtrain.data import compressed
from hvdtrain.data.compressed import SUFFIXES
from hvdtrain.data.config import DataConfig
from hvdtrain.data.packed import read_text
from hvdtrain.data.records import JsonLines, TarShards
from hvdtrain.data.text import Tokenizer
from hvdtrain.data.tokenize import Source, tokenize
from hvdtrain.errors import UserError
from hvdtrain.runtime.mpi import Alone
from tests.support.ranged_http import serving

RECORDS = [{"text": f"document {number} " + "x" * (number % 50)} for number in range(500)]
PARTS = [
    "".join(json.dumps(record) + "\n" for record in RECORDS[at : at + 125]).encode()
    for at in range(0, 500, 125)
]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def written(directory: Path, suffix: str, members: int) -> Path:
    """Write the records with as many members or frames."""
    parts = [b"".join(PARTS)] if members == 1 else PARTS
    file = directory / f"a.jsonl{suffix}"
    file.write_bytes(b"".join(map(COMPRESS[suffix], parts)))
    return file


def plain(directory: Path) -> Path:
    directory.mkdir()
    file = directory / "a.jsonl"
    file.write_bytes(b"".join(PARTS))
    return file


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_records_are_those_of_the_uncompressed_file(
    tmp_path: Path, suffix: str, members: int
) -> None:
    file = written(tmp_path, suffix, members)
    lines = JsonLines([str(file)])
    assert [lines[number] for number in range(len(lines))] == RECORDS
    assert lines.where(130) == f"{file}: line 131"
    assert JsonLines([str(tmp_path)]).fingerprint() == lines.fingerprint()
    # What `datasets` reads of it.
    cache = str(tmp_path / "cache")
    oracle = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
    assert oracle["text"][:] == [record["text"] for record in RECORDS]
    kept, expected = (
        read_text(DataConfig("jsonl", [str(one)]), Tokenizer(None))
        for one in (file, plain(tmp_path / "plain"))
    )
    assert [part.tolist() for part in kept] == [part.tolist() for part in expected]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tokenized_files_are_those_of_the_uncompressed_file(tmp_path: Path, suffix: str) -> None:
    outs = []
    for file in (written(tmp_path, suffix, 4), plain(tmp_path / "plain")):
        out = tmp_path / f"out{file.suffix}"
        tokenize(Source([str(file)], kind="jsonl"), out, Alone())
        outs.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert outs[0] == outs[1] and len(outs[0]) == 3


def test_copy_is_made_again_when_the_file_changes(tmp_path: Path) -> None:
    file = written(tmp_path, ".gz", 1)
    cache = tmp_path / "cache"
    assert len(JsonLines([str(file)], str(cache))) == 500
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    (copy,) = cache.glob(".*.a.jsonl")
    before = copy.stat().st_mtime_ns
    assert len(JsonLines([str(file)], str(cache))) == 500
    assert copy.stat().st_mtime_ns == before
    file.write_bytes(gzip.compress(PARTS[0]))
    assert len(JsonLines([str(file)], str(cache))) == 125
    (other,) = cache.glob(".*.a.jsonl")
    (index,) = cache.glob("*.index.npy")
    assert other != copy and other.name in index.name


def _number_of_lines(arguments: tuple[str, Any]) -> int:
    file, barrier = arguments
    barrier.wait(60)
    return len(JsonLines([file]))


def test_processes_share_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, ".xz", 4)
    opened = tmp_path / "opened"

    def counted(name: Path) -> Any:
        with opened.open("a") as times:
            times.write("x")
        return original(name)

    original = compressed.open_decompressed
    monkeypatch.setattr(compressed, "open_decompressed", counted)
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        barrier = manager.Barrier(4)
        with context.Pool(4) as pool:
            found = pool.map(_number_of_lines, [(str(file), barrier)] * 4, chunksize=1)
    assert found == [500] * 4 and opened.read_text() == "x"
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("."))
    assert [name.endswith(("a.jsonl", ".index.npy")) for name in names] == [True, True]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_file_is_refused_with_its_name(tmp_path: Path, suffix: str) -> None:
    file = written(tmp_path, suffix, 1)
    file.write_bytes(file.read_bytes()[:-9])
    message = rf"a\.jsonl{suffix} cannot be decompressed \(.*\): it is truncated or damaged"
    with pytest.raises(UserError, match=message):
        JsonLines([str(file)])
    with pytest.raises(UserError, match=message):
        read_text(DataConfig("jsonl", [str(file)]), Tokenizer(None))
    assert {path.name for path in tmp_path.iterdir()} == {file.name}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_second_member_is_refused(tmp_path: Path, suffix: str) -> None:
    """The file objects of bz2 and lzma end silently there."""
    file = written(tmp_path, suffix, 4)
    first = len(COMPRESS[suffix](PARTS[0]))
    content = bytearray(file.read_bytes())
    content[first : first + 8] = b"damaged!"
    file.write_bytes(content)
    with pytest.raises(UserError, match="cannot be decompressed"):
        JsonLines([str(file)])


def test_skippable_frames_and_padding_are_skipped(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"
    packed = COMPRESS[".zst"](PARTS[0])
    (tmp_path / "a.jsonl.zst").write_bytes(skippable + packed + skippable + packed)
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(PARTS[0]) + bytes(4))
    assert len(JsonLines([str(tmp_path)])) == 3 * 125


def test_processes_decompress_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, ".xz", 4)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        barrier = manager.Barrier(4)
        with context.Pool(4) as pool:
            found = pool.map(_number_of_lines, [(str(file), barrier)] * 4, chunksize=1)
    assert found == [500] * 4


def test_empty_decompressed_file_does_not_hide_the_compressed_one(tmp_path: Path) -> None:
    written(tmp_path, ".gz", 1)
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl").write_bytes(PARTS[0])
    assert len(JsonLines([str(tmp_path)])) == 625
    (tmp_path / "a.jsonl").write_bytes(b"".join(PARTS))
    assert len(JsonLines([str(tmp_path / "?.jsonl"), str(tmp_path / "*.gz")])) == 625


def test_file_that_is_only_named_as_compressed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(PARTS[0])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz is not compressed, although its name"):
        JsonLines([str(tmp_path)])


def test_line_that_is_no_object_is_named_by_the_compressed_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(PARTS[0] + b"[1]\n"))
    lines = JsonLines([str(tmp_path)])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: line 126 is not a JSON object"):
        _ = lines[125]


def test_compressed_file_next_to_its_content_is_not_read_twice(tmp_path: Path) -> None:
    written(tmp_path, ".gz", 1)
    (tmp_path / "a.jsonl").write_bytes(b"".join(PARTS))
    (tmp_path / "b.jsonl.zst").write_bytes(COMPRESS[".zst"](PARTS[0]))
    assert len(JsonLines([str(tmp_path)])) == 625


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tar_shards_are_read_as_uncompressed_ones(tmp_path: Path, suffix: str) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for number in range(20):
            for name, data in (("jpg", bytes([number]) * 999), ("cls", b"%d" % number)):
                member = tarfile.TarInfo(f"{number:04}.{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    (tmp_path / f"a.tar{suffix}").write_bytes(COMPRESS[suffix](content.getvalue()))
    shards = TarShards([str(tmp_path)])
    assert len(shards) == 20
    for number in np.random.default_rng(0).permutation(20):
        sample = shards[int(number)]
        assert sample["jpg"] == bytes([number]) * 999 and sample["cls"] == b"%d" % number
        assert sample["__shard__"] == str(tmp_path / f"a.tar{suffix}")


def test_compressed_file_behind_a_url_needs_a_cache(tmp_path: Path) -> None:
    with serving() as server:
        server.files["/a.jsonl.gz"] = written(tmp_path, ".gz", 4).read_bytes()
        url = server.url("/a.jsonl.gz")
        lines = JsonLines([url], str(tmp_path / "cache"))
        assert [lines[number] for number in range(len(lines))] == RECORDS
        train, _ = read_text(DataConfig("jsonl", [url]), Tokenizer(None))
        assert len(train) > 1000
        with pytest.raises(UserError, match=r"a\.jsonl\.gz: a compressed .* set data\.cache"):
            JsonLines([url])
