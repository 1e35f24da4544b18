"""Directories of MDS, written by mosaicml-streaming 0.13.0.

tests/data/mds-0.13.0 was written by its MDSWriter with size_limit=700 to 65536 (several shards),
and compression zstd:3, gz, bz2, snappy and br; `merged` by merge_index. expected.json has what its
StreamingDataset(shuffle=False) returned, see `canonical`. The library cannot be a dependency of the
tests: it requires older versions of transformers and numpy.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hvdtrain.data import chunks
from hvdtrain.data.chunks import Opened
from hvdtrain.data.compressed import decompressed
from hvdtrain.data.mds import MdsSamples
from hvdtrain.errors import UserError
from tests.support.canonical import canonical
from tests.support.runs import environment

DATA = Path(__file__).parents[1] / "data/mds-0.13.0"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())
READ = [name for name in EXPECTED if name != "pickled"]


def copied(directory: Path, name: str) -> Path:
    return Path(shutil.copytree(DATA / name, directory / name))


def change_index(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((path / "index.json").read_text())
    change(index)
    (path / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", READ)
def test_samples_are_bitwise_those_of_the_library(name: str) -> None:
    samples = MdsSamples(str(DATA / name))
    assert len(samples) == samples.shard_samples.sum() == len(EXPECTED[name])
    for index in np.random.default_rng(0).permutation(len(samples)).tolist():
        assert canonical(samples[index]) == EXPECTED[name][index]
    with pytest.raises(IndexError):
        _ = samples[len(samples)]


def test_columns_are_chosen_and_pickles_of_others_are_not_read() -> None:
    samples = MdsSamples(str(DATA / "pickled"), ["number"])
    assert [canonical(samples[index]) for index in range(3)] == EXPECTED["pickled"]
    with pytest.raises(UserError, match=r"plain has no column 'label', but array, array_float16"):
        MdsSamples(str(DATA / "plain"), ["str", "label"])


def test_arrays_can_be_written_to() -> None:
    samples = MdsSamples(str(DATA / "plain"))
    for name in ("array", "array_int32", "array_int16_2x3"):
        samples[0][name][:] = 7
    assert canonical(samples[0]) == EXPECTED["plain"][0]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_samples_are_read_in_data_workers(start: str) -> None:
    samples = MdsSamples(str(DATA / "gz"))
    _ = samples[0]
    loader = DataLoader(samples, batch_size=None, num_workers=2, multiprocessing_context=start)
    assert [canonical(sample) for sample in loader] == EXPECTED["gz"]
    content = pickle.dumps(samples)
    assert len(content) < 1000 and canonical(pickle.loads(content)[7]) == EXPECTED["gz"][7]


def test_decompressed_file_next_to_a_shard_is_mapped(tmp_path: Path) -> None:
    path = copied(tmp_path, "zstd")
    packed = path / "shard.00000.mds.zstd"
    packed.with_suffix("").write_bytes(decompressed(packed, packed.read_bytes(), ".zst"))
    samples = MdsSamples(str(path))
    assert samples.where(0) == f"{path}/shard.00000.mds: sample 1"
    assert samples.where(13) == f"{path}/shard.00001.mds.zstd: sample 1"
    assert [canonical(samples[index]) for index in range(40)] == EXPECTED["zstd"]


def test_memory_of_decompressed_shards_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_CACHE_BYTES", 1500)
    added: list[int] = []
    add = Opened.add

    def counted(self: Opened, key: Any, *more: Any) -> Any:
        added.append(key)
        return add(self, key, *more)

    monkeypatch.setattr(Opened, "add", counted)
    samples = MdsSamples(str(DATA / "bz2"))
    assert [canonical(samples[index]) for index in range(40)] == EXPECTED["bz2"]
    _ = samples[39], samples[26], samples[0]  # shards 2 and 3 are still there
    assert added == [0, 1, 2, 3, 0]


def test_fingerprint_changes_with_content_and_not_with_the_place(tmp_path: Path) -> None:
    path = copied(tmp_path, "plain")
    before = MdsSamples(str(path)).fingerprint()
    assert before == MdsSamples(str(DATA / "plain")).fingerprint()
    content = bytearray((path / "shard.00001.mds").read_bytes())
    content[-1] ^= 1
    (path / "shard.00001.mds").write_bytes(content)
    assert MdsSamples(str(path)).fingerprint() != before


def _shard(**change: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda index: index["shards"][1].update(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda index: index.update(version=1),
            r"index\.json is not an index of MDS \(version 2\)",
        ),
        (lambda index: index.update(shards=[]), r"index\.json has no samples"),
        (_shard(format="csv"), r'a shard has the format "csv", version 2: only mds, version 2, is'),
        (_shard(samples="3"), r"index\.json: a shard is \{.*: copy it again"),
        (_shard(samples=4), r"shard\.00001\.mds has 3 samples, but 4 in index\.json: copy the"),
        (_shard(column_sizes=[]), r"a shard has columns without an encoding or a size: copy it"),
        (
            lambda index: index["shards"][0]["column_encodings"].__setitem__(0, "video"),
            r"column 'array' has the encoding \"video\", which is not read: omit it",
        ),
        (
            lambda index: index["shards"][0]["column_sizes"].__setitem__(2, 5),
            r"column 'array_int16_2x3' \(ndarray:int16:2,3\) has the size 5: copy it again",
        ),
        (
            lambda index: index["shards"][0]["raw_data"].update(basename="../a.mds"),
            r'index\.json: "\.\./a\.mds" leaves the directory: write it again',
        ),
        (
            lambda index: index["shards"][0]["raw_data"].update(basename="/etc/passwd"),
            r'"/etc/passwd" leaves the directory',
        ),
    ],
)
def test_foreign_index_is_refused_in_one_line(tmp_path: Path, change: Any, message: str) -> None:
    path = copied(tmp_path, "plain")
    change_index(path, change)
    with pytest.raises(UserError, match=message) as raised:
        samples = MdsSamples(str(path))
        _ = [samples[index] for index in range(len(samples))]
    assert "\n" not in str(raised.value)


def test_truncated_and_damaged_shards_are_refused(tmp_path: Path) -> None:
    path = copied(tmp_path, "plain")
    file = path / "shard.00001.mds"
    content = file.read_bytes()
    file.write_bytes(content[:2000])
    with pytest.raises(UserError, match=r"shard\.00001\.mds has 2000 bytes, but 2781 in index\.js"):
        MdsSamples(str(path))
    file.unlink()
    with pytest.raises(UserError, match=r"shard\.00001\.mds of index\.json: No such file"):
        MdsSamples(str(path))
    file.write_bytes(content[:4] + b"\xff" * 8 + content[12:])
    samples = MdsSamples(str(path))
    with pytest.raises(UserError, match=r"00001\.mds is truncated or damaged: its offsets exceed"):
        _ = samples[5]
    begin = int.from_bytes(content[4:8], "little")
    file.write_bytes(content[:begin] + b"\x07" + content[begin + 1 :])
    samples = MdsSamples(str(path))
    with pytest.raises(UserError, match=r"00001\.mds: sample 1 is damaged \(.*\): copy it again"):
        _ = samples[5]


def test_damaged_compressed_shard_is_refused(tmp_path: Path) -> None:
    path = copied(tmp_path, "zstd")
    file = path / "shard.00000.mds.zstd"
    file.write_bytes(file.read_bytes()[:-9] + bytes(9))
    samples = MdsSamples(str(path))
    with pytest.raises(UserError, match=r"00000\.mds\.zstd cannot be decompressed \(.*copy it ag"):
        _ = samples[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "pickled",
            r"pickled: column 'any' has pickles, which are code: write it as json, or omit",
        ),
        ("snappy", r'mds\.snappy is compressed with "snappy", which is not read, only zstd, gz, b'),
        ("br", r'compressed with "br", which is not read, .*: decompress it to shard\.00000\.mds'),
        ("", r"has no index\.json: name one of br, bz2, gz, images"),
    ],
)
def test_what_is_not_read_is_named(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        MdsSamples(str(DATA / name))
    with pytest.raises(UserError, match=r"data: s3://bucket/mds: chunks are read from local files"):
        MdsSamples("s3://bucket/mds", key="data")


def test_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/datasets.md").read_text()
    (example,) = re.findall(r"```python\n(from hvdtrain\.data\.mds .*?)```", page, re.DOTALL)
    shutil.copytree(DATA / "merged", tmp_path / "mds")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(example, found)
    assert found["sample"] == {"text": "text 7 text 7 text 7 "}


SCRIPT = """
import torch
import hvdtrain
from hvdtrain.data.mds import MdsSamples

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
seen = []
with hvdtrain.training(model, optimizer, MdsSamples(DIRECTORY)) as training:
    for step in training:
        with step:
            for batch in step:
                seen += batch["number"].tolist()
                step.backward(model(batch["number"][:, None] / 40).mean())
print("seen", seen)
"""
FLAGS = (
    "--run.id run --train.duration 5 --batch.global_size 8 --batch.micro_size 4 --telemetry.port 0"
    " --loader.order sequential --loader.shuffle_buffer 16 --loader.workers 0 --run.root"
)


def test_run_in_sequential_order_reads_each_sample_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("DIRECTORY", repr(str(DATA / "merged"))))
    done = subprocess.run(
        [sys.executable, str(script), *FLAGS.split(), str(tmp_path / "runs")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("seen ")]
    seen = json.loads(line.removeprefix("seen "))
    assert sorted(seen) == list(range(40)) and seen != sorted(seen)
    assert torch.tensor(seen[:16]).max() < 32, "more shards than the buffer holds"
