"""Shards behind URLs: on an S3 server (moto) and on an HTTP server, compared with local files."""

from __future__ import annotations

import io
import json
import logging
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvdtrain import cli
from hvdtrain.data import remote
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig, DataConfig, LoaderConfig
from hvdtrain.data.files import expand, find_files, first_change, split_files
from hvdtrain.data.loader import Loading, TrainLoader
from hvdtrain.data.packed import read_packed, read_text
from hvdtrain.data.parquet import ParquetRows
from hvdtrain.data.records import JsonLines, TarShards
from hvdtrain.data.remote import RemoteFile
from hvdtrain.data.text import Tokenizer
from hvdtrain.data.token_files import TokenMeta, read_token_files
from hvdtrain.data.tokens import TokenWindows
from hvdtrain.errors import UserError
from hvdtrain.runtime.mesh import Group
from tests.support.ranged_http import RangedServer, serving
from tests.support.runs import TINY, losses, run, train

BUCKET = "s3://shards"


def _tar(count: int, first: int) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as shard:
        for number in range(first, first + count):
            for suffix, content in (("txt", b"x" * 300), ("cls", str(number).encode())):
                info = tarfile.TarInfo(f"{number:05}.{suffix}")
                info.size = len(content)
                shard.addfile(info, io.BytesIO(content))
    return found.getvalue()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with shards of each kind: 20 and 7 samples, and 1,500 tokens."""
    directory = tmp_path_factory.mktemp("local")
    for name, count, first in (("0", 20, 0), ("1", 7, 20)):
        numbers = range(first, first + count)
        rows = [{"n": n, "text": f"document {n}"} for n in numbers]
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (directory / f"{name}.tar").write_bytes(_tar(count, first))
        table = pa.table({key: [row[key] for row in rows] for key in ("n", "text")})
        pq.write_table(table, directory / f"{name}.parquet", row_group_size=6)
        tokens = np.random.default_rng(first).integers(0, 256, 1000 - 25 * first)
        tokens.astype("<u2").tofile(directory / f"{name}.u16")
    TokenMeta(256, "bytes").write(directory)
    return directory


@pytest.fixture(scope="module")
def s3(local: Path) -> Iterator[str]:
    """URL of a directory with the same files on an S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir(BUCKET)
        for path in local.iterdir():
            system.pipe_file(f"{BUCKET}/data/{path.name}", path.read_bytes())
        yield f"{BUCKET}/data"
        server.stop()


@pytest.fixture
def http() -> Iterator[RangedServer]:
    with serving() as server:
        yield server


def _samples(data: Any) -> list[dict[str, Any]]:
    found = [data[i] for i in range(len(data))]
    return [{k: v for k, v in sample.items() if k != "__shard__"} for sample in found]


@pytest.mark.parametrize("kind", [JsonLines, TarShards, ParquetRows])
def test_shards_on_s3_have_the_samples_of_local_files(
    local: Path, s3: str, tmp_path: Path, kind: type
) -> None:
    there, here = kind([s3], cache=str(tmp_path)), kind([str(local)], cache=str(tmp_path / "b"))
    assert _samples(there) == _samples(here) and len(here) == 27
    assert there.shard_samples.tolist() == here.shard_samples.tolist() == [20, 7]
    assert len(list(tmp_path.glob("*.index.npy"))) == 2
    assert there.fingerprint() == kind([f"{s3}/*"], cache=str(tmp_path)).fingerprint()
    assert _samples(pickle.loads(pickle.dumps(there))) == _samples(here)


def test_workers_read_s3_shards_that_their_rank_has_read(s3: str, tmp_path: Path) -> None:
    for data in (JsonLines([s3], str(tmp_path)), ParquetRows([s3], ["n"], str(tmp_path))):
        found = []
        assert data[3]["n"] == 3  # the rank's file system and block cache have threads
        for workers in (0, 2):
            loading = Loading(LoaderConfig(workers))
            assignment = Assignment(3, Group(0, 1))
            loader = TrainLoader(data, 0, BatchConfig(27, 9), assignment, 1, loading)
            found.append([n for batch in loader.next_step(0) for n in batch["n"].tolist()])
            loader.close()
        assert found[0] == found[1] and sorted(found[0]) == [*range(27)]


def test_token_files_on_s3_have_the_windows_of_local_files(local: Path, s3: str) -> None:
    for context in (10, 64):
        (there, meta), (here, _) = (read_token_files("k", [str(d)]) for d in (s3, local))
        windows, expected = TokenWindows(there, context), TokenWindows(here, context)
        assert all((a == b).all() for a, b in zip(windows, expected, strict=True))  # type: ignore[call-overload]
        assert meta == TokenMeta(256, "bytes")
        assert windows.shard_samples.sum() == len(windows)
        assert windows.shard_samples.tolist() == expected.shard_samples.tolist()
    split = read_packed(DataConfig("tokens", s3, validation_fraction=0.1), None)
    assert [len(array) for array in (*split.train, *split.validation)] == [1000, 450, 50]


def test_text_records_on_s3_have_the_tokens_of_local_files(local: Path, s3: str) -> None:
    for source in ("jsonl", "parquet"):
        found = [
            read_text(DataConfig(source, str(place)), Tokenizer(None))  # type: ignore[arg-type]
            for place in (s3, local)
        ]
        assert all((a == b).all() for a, b in zip(*found, strict=True))


def test_run_on_s3_tokens_has_the_curve_of_local_tokens(
    local: Path, s3: str, tmp_path: Path
) -> None:
    curves = []
    for name, place in (("here", str(local)), ("there", s3)):
        flags = ["--data.source", "tokens", "--data.train", place, "--train.duration", "3"]
        flags += ["--data.validation_fraction", "0.1"]
        curves.append(losses(train(tmp_path, name, flags, "gloo:2" if name == "there" else "")))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def test_index_command_writes_indexes_next_to_s3_shards(
    s3: str, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system = fsspec.filesystem("s3")
    system.pipe_file(f"{BUCKET}/indexed/0.tar", (local / "0.tar").read_bytes())
    with pytest.raises(UserError, match=r"0\.tar: there is no index next to this remote file: n"):
        TarShards([f"{BUCKET}/indexed"])
    for built in (1, 0):
        assert cli.main(["data", "index", "--input", f"{BUCKET}/indexed"]) == 0
        assert f"tar shard: 1; indexes built: {built}" in capsys.readouterr().out
    assert len(TarShards([f"{BUCKET}/indexed"])) == 20


def test_sequential_reads_cost_one_request_per_block(http: RangedServer, tmp_path: Path) -> None:
    rows = [json.dumps({"n": n, "text": "x" * 5000}) for n in range(4000)]  # 20 MB
    http.files["/a.jsonl"] = "\n".join(rows).encode()
    data = JsonLines([http.url("/a.jsonl")], cache=str(tmp_path))
    http.requested.clear()
    assert [data[i]["n"] for i in range(len(data))] == [*range(4000)]
    assert len(http.requested) <= 12
    assert sum(size for _, size in http.requested) <= 1.01 * len(http.files["/a.jsonl"])


def test_failed_requests_are_repeated_and_reported(
    http: RangedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(remote, "_PAUSES", (0.01, 0.01))
    http.files["/a.jsonl"] = b'{"n": 1}\n{"n": 2}\n'
    http.failures = 2
    with caplog.at_level(logging.WARNING):
        data = JsonLines([http.url("/a.jsonl")], cache=str(tmp_path))
    assert len(data) == 2
    assert sum("503" in r.getMessage() and "again in" in r.getMessage() for r in caplog.records) > 1
    http.failures = 100
    with pytest.raises(UserError, match=r"a\.jsonl: cannot be read \(503"):
        _ = data[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gone", "the file has disappeared"),
        ("short", "ends after 10 bytes, but byte 18 is needed: the file has shrunk"),
        ("whole", "does not support requests for parts of a file"),
    ],
)
def test_changes_of_a_remote_shard_while_it_is_read_are_one_line(
    http: RangedServer, tmp_path: Path, change: str, message: str
) -> None:
    http.files["/a.jsonl"] = b'{"n": 1}\n{"n": 2}\n'
    http.files["/b.jsonl"] = http.files["/a.jsonl"]
    urls = [http.url("/a.jsonl"), http.url("/b.jsonl")]
    data = JsonLines(urls, cache=str(tmp_path))
    if change == "gone":
        del http.files["/b.jsonl"]
    elif change == "short":
        http.files["/b.jsonl"] = http.files["/b.jsonl"][:10]
    else:
        http.ranges = False
        http.files["/b.jsonl"] += b"\n"
    with pytest.raises(UserError, match=message):
        _ = data[3]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("nowhere://a/b.jsonl", "Protocol not known: nowhere"),
        ("memory://none/*.jsonl", r"no file \(\*\.jsonl, \*\.ndjson\) matches 'memory://none"),
        ("memory://none/a.jsonl", "no file"),
    ],
)
def test_mistaken_urls_are_one_line(tmp_path: Path, pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        JsonLines([pattern], cache=str(tmp_path), key="data.train")
    with pytest.raises(UserError, match="read from local files, not from URLs"):
        expand("tabular.train", [pattern])


def test_remote_files_are_split_for_validation_like_local_files(tmp_path: Path) -> None:
    names = [f"{number}.txt" for number in range(6)]
    here = [tmp_path / name for name in names]
    for path in here:
        path.write_text("a document")
    there = [RemoteFile(f"{BUCKET}/{name}", 10, 0) for name in names]
    found = [[[file.name for file in part] for part in split_files(f, 0.3)] for f in (there, here)]
    assert found[0] == found[1]
    assert [len(part) for part in found[0]] == [4, 2]


def test_local_and_remote_patterns_can_be_mixed(local: Path, tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    system.pipe_file("/mixed/2.jsonl", b'{"n": 27}')
    patterns = ["memory://mixed", f"file://{local}", str(local / "0.jsonl")]
    data = JsonLines(patterns, cache=str(tmp_path))
    assert [row["n"] for row in _samples(data)] == [*range(28)]
    assert [*map(str, find_files("k", patterns, (".jsonl",)))][2:] == ["memory:///mixed/2.jsonl"]
    before = data.fingerprint()
    system.pipe_file("/mixed/2.jsonl", b'{"n": 28}')
    after = JsonLines(patterns, cache=str(tmp_path)).fingerprint()
    assert after != before and "2.jsonl has changed (1 samples" in str(
        first_change(before.files, after.files)
    )


def test_changed_shard_between_runs_is_named(local: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for name in ("0.u16", "1.u16", "tokens.json"):
        (shards / name).write_bytes((local / name).read_bytes())
    flags = ["--data.source", "tokens", "--data.train", str(shards), "--data.validation"]
    flags += [str(local / "0.u16"), "--run.root", str(tmp_path), "--run.id", "a"]
    train(tmp_path, "a", [*flags, "--train.duration", "1"])
    content = (shards / "1.u16").read_bytes()
    for change, message in (
        (None, "1.u16 (14 samples) has disappeared"),
        (content[:-2], "1.u16 has shrunk from 1000 to 998 bytes"),
        (content[2:] + content[:2], "1.u16 has changed (14 samples before, 14 now)"),
    ):
        (shards / "1.u16").unlink(missing_ok=True)
        if change is not None:
            (shards / "1.u16").write_bytes(change)
        done = run(tmp_path / "output", [*TINY, *flags, "--train.duration", "2"])
        assert done.returncode == 2 and done.stderr.count("error:") == 1, done
        assert f"is not that of the run's last start: {message}; restore it" in done.stderr, done
