"""Runs on files of other programs, on several numbers of ranks and through a kill."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import psutil
import pytest
import torch
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.support.faults import assert_clean
from tests.support.job import poll
from tests.support.runs import REPOSITORY, losses, metrics, start, train

pytestmark = pytest.mark.slow

RANDOM = np.random.default_rng(0)
TEXTS = ["".join(map(chr, RANDOM.integers(97, 123, size))) for size in RANDOM.integers(9, 300, 200)]
STEPS = 9
EXACT = ["--exchange.name", "exact", "--runtime.threads", "1", "--checkpoint.every", "1"]


def _megatron(directory: Path) -> list[str]:
    builder = IndexedDatasetBuilder(str(directory / "a.bin"), dtype=np.uint16)
    for text in TEXTS:
        builder.add_document(torch.tensor([*text.encode(), 0]), [len(text) + 1])
    builder.finalize(str(directory / "a.idx"))
    (directory / "tokens.json").write_text('{"vocab_size": 256, "tokenizer": "bytes"}')
    return ["tokens", str(directory / "a.bin")]


def _jsonl(directory: Path, compress: bool = False) -> list[str]:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    if compress:
        lines = zstandard.ZstdCompressor().compress(lines)
    file = directory / f"a.jsonl{'.zst' if compress else ''}"
    file.write_bytes(lines)
    return ["jsonl", str(file)]


def _zst(directory: Path) -> list[str]:
    return _jsonl(directory, compress=True)


def _arrow(directory: Path) -> list[str]:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(directory / "saved"))
    return ["arrow", str(directory / "saved")]


def _flags(data: list[str], steps: int) -> list[str]:
    source = ["--data.source", data[0], "--data.train", data[1]]
    return [*EXACT, *source, "--train.duration", str(steps)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of one rank on uncompressed JSON lines."""
    directory = tmp_path_factory.mktemp("expected")
    return losses(train(directory, "alone", _flags(_jsonl(directory), STEPS)))


@pytest.mark.parametrize("write", [_megatron, _zst, _arrow])
def test_curve_is_bitwise_that_of_json_lines_on_any_ranks(
    tmp_path: Path, expected: list[float], write: Any
) -> None:
    data = write(tmp_path)
    train(tmp_path, "run", _flags(data, 4), "gloo:2")
    directory = train(tmp_path, "run", _flags(data, STEPS), "gloo:3")
    assert losses(directory) == expected
    assert_clean(directory)


FLAGS = (
    "--run.id run --batch.global_size 6 --batch.micro_size 2"
    " --loader.workers 1 --loader.order sequential --loader.shuffle_buffer 24"
    " --checkpoint.every 1 --telemetry.port 0"
)
SCRIPT = """
import os, sys, time
import torch
import hvdtrain
from hvdtrain.data.arrays import ArrayWindows
from hvdtrain.data.arrow import ArrowRows
from hvdtrain.data.litdata import LitSamples
from hvdtrain.data.mds import MdsSamples
from hvdtrain.data.records import JsonLines

class Values(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows
        self.shard_samples = rows.shard_samples
        self.fingerprint = rows.fingerprint
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        row = self.rows[index]
        number = row[1] if isinstance(row, tuple) else row["number"]
        return torch.tensor([float(number)])

kind, path = os.environ["TEST_DATA"].split(":")
if kind == "arrays":
    rows = ArrayWindows(path, ["number"], "dim_0")
elif kind in ("mds", "litdata"):
    rows = {"mds": MdsSamples, "litdata": LitSamples}[kind](path)
else:
    rows = {"arrow": ArrowRows, "lines": JsonLines}[kind]([path])
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
with hvdtrain.training(model, optimizer, Values(rows), metrics=["sum"]) as training:
    for step in training:
        with step:
            for values in step:
                step.backward((model(values / 96) ** 2).mean(), sum=(values.sum(), 1))
        time.sleep(0.05)
"""


# By the libraries themselves, see test_mds.py and test_litdata.py.
WRITTEN = {"mds": "mds-0.13.0/merged", "litdata": "litdata-0.2.76/small"}


def _numbers(directory: Path, kind: str) -> str:
    """Write the numbers 0 to 95, or find those from 0 to 39; return what the script needs."""
    if kind in WRITTEN:
        return f"{kind}:{REPOSITORY / 'tests/data' / WRITTEN[kind]}"
    if kind == "arrays":
        with h5py.File(directory / "a.h5", "w") as file:
            file.create_dataset("number", data=np.arange(96, dtype=np.float32), chunks=(10,))
        return f"arrays:{directory / 'a.h5'}"
    if kind == "arrow":
        found = datasets.Dataset.from_dict({"number": list(range(96))})
        found.save_to_disk(str(directory / "saved"), num_shards=3)
        return f"arrow:{directory / 'saved'}"
    lines = "".join(json.dumps({"number": number}) + "\n" for number in range(96)).encode()
    (directory / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    return f"lines:{directory / 'a.jsonl.zst'}"


@pytest.mark.parametrize("kind", ["arrays", "arrow", "lines", *WRITTEN])
def test_each_sample_is_used_once_through_a_kill_in_an_own_loop(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    samples, epochs = (40, 3) if kind in WRITTEN else (96, 1)
    steps = samples * epochs // 6
    where = ["--run.root", str(tmp_path / "runs"), "--train.duration", str(steps)]
    flags = [*FLAGS.split(), *where]
    env = {"TEST_DATA": _numbers(tmp_path, kind)}
    command, directory = [sys.executable, str(script)], tmp_path / "runs/run"
    job = start(tmp_path / "killed", flags, "gloo:2", env, command)
    poll(lambda: len(metrics(directory)) >= 4 or not job.running(), 60, "step 4")
    found = psutil.process_iter(["cmdline"])
    ranks = [process for process in found if str(script) in (process.info["cmdline"] or ())]
    ranks[-1].kill()
    assert job.wait(90).returncode != 0
    done = start(tmp_path / "continued", flags, "gloo:3", env, command).wait(90)
    assert done.returncode == 0, done
    lines = metrics(directory)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    expected = epochs * sum(range(samples))
    assert sum(3 * line["sum"] for line in lines) == expected, "a sample twice, or never"
    assert_clean(directory)
