"""Directories of litdata, written by litdata 0.2.76.

tests/data/litdata-0.2.76 was written by its `optimize` with num_workers=1, chunk_bytes=900 to 5000
or chunk_size=5 to 64; `chunk`, `batch` and `sample` with these compression levels of zstd, and
the three directories of tokens with item_loader=TokensLoader(). expected.json has what its
StreamingDataset returned, of tokens for a block size, see `canonical`. It decodes JPEG with Pillow
if they have EXIF, as here.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from hvdtrain.data import chunks
from hvdtrain.data.lit_leaves import leaf_decoder
from hvdtrain.data.litdata import LitSamples
from hvdtrain.errors import UserError
from tests.support.canonical import canonical
from tests.support.runs import environment

DATA = Path(__file__).parents[1] / "data/litdata-0.2.76"
DOCS = Path(__file__).parents[2] / "docs"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())


def opened(name: str, directory: Path = DATA) -> LitSamples:
    """Open a directory, such as small, or tokens:8 for windows of 8 tokens."""
    name, _, window = name.partition(":")
    return LitSamples(str(directory / name), int(window) if window else None)


def copied(directory: Path, name: str) -> Path:
    return Path(shutil.copytree(DATA / name, directory / name))


@pytest.mark.parametrize("name", EXPECTED)
def test_samples_are_bitwise_those_of_the_library(name: str) -> None:
    samples = opened(name)
    assert len(samples) == samples.shard_samples.sum() == len(EXPECTED[name])
    for index in np.random.default_rng(0).permutation(len(samples)).tolist():
        assert canonical(samples[index]) == EXPECTED[name][index]
    with pytest.raises(IndexError):
        _ = samples[len(samples)]


@pytest.mark.parametrize("name", ["unread_batch", "unread_sample"])
def test_uncompressed_samples_that_the_library_does_not_read(name: str) -> None:
    """litdata 0.2.76 leaves samples of plain tuples uncompressed, and refuses to read them."""
    samples = opened(name)
    assert [canonical(samples[index]) for index in range(40)] == EXPECTED["small"]


def test_arrays_and_tensors_can_be_written_to() -> None:
    samples = opened("leaves")
    for _ in range(2):
        sample = samples[2]
        assert canonical(sample) == EXPECTED["leaves"][2] and type(sample["bytes"]) is bytes
        sample["np1"][:] = 7
        sample["t2"][0].add_(1)
        sample["t1"].zero_()


def test_windows_are_of_one_chunk() -> None:
    samples = opened("tokens:8")
    assert samples.shard_samples.tolist() == [7, 8, 7, 8, 7, 2]  # of 63, 64, 56, 64, 56, 16 tokens
    stored = opened("tokens:1")
    first = torch.cat([stored[index] for index in range(63)])
    assert torch.equal(torch.stack([samples[i] for i in range(7)]).view(-1), first[:56])
    assert samples[7][0] == stored[63][0]
    with pytest.raises(UserError, match=r"has no samples, or no chunk with 65 tokens"):
        opened("tokens:65")


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("name", ["batch", "tokens:10"])
def test_samples_are_read_in_data_workers(name: str, start: str) -> None:
    samples = opened(name)
    _ = samples[0]
    loader = DataLoader(samples, batch_size=None, num_workers=2, multiprocessing_context=start)
    assert len(content := pickle.dumps(samples)) < 1000
    for index in (7, 20):
        assert canonical(pickle.loads(content)[index]) == EXPECTED[name][index]
    if name == "tokens:10":  # without `batch_size`, arrays become tensors
        assert [canonical(sample) for sample in loader] == EXPECTED[name]
    else:
        assert [sample["text"] for sample in loader] == [samples[i]["text"] for i in range(40)]


@pytest.mark.parametrize(("kind", "mode"), [("JPEG", "RGB"), ("JPEG", "L"), ("PNG", "RGBA")])
def test_image_files_become_tensors(kind: str, mode: str) -> None:
    shape = {"RGB": (4, 5, 3), "L": (4, 5), "RGBA": (4, 5, 4)}[mode]
    pixels = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    found = leaf_decoder("data", "image:file")(file.getvalue(), 0, len(file.getvalue()))
    expected = np.asarray(Image.open(file).convert("RGB"))
    assert found.dtype == torch.uint8 and np.array_equal(found.permute(1, 2, 0), expected)


def test_bfloat16_tensors_are_read() -> None:
    values = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    content = values.view(torch.uint8).numpy().tobytes()
    assert torch.equal(leaf_decoder("data", "no_header_tensor:10")(content, 0, 4), values)
    headed = struct.pack(">III", 10, 1, 2) + content
    assert torch.equal(leaf_decoder("data", "tensor")(headed, 0, len(headed)), values)


@pytest.mark.parametrize("name", ["chunk", "batch", "texts_zstd", "small"])
def test_content_that_memory_does_not_hold_is_read_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_CACHE_BYTES", 1)
    monkeypatch.setattr(chunks, "_OPEN_FILES", 1)
    samples = opened(name)
    for index in np.random.default_rng(0).permutation(len(samples)).tolist():
        assert canonical(samples[index]) == EXPECTED[name][index]
    assert len(samples._opened._found) == 1


def test_fingerprint_changes_with_content_and_not_with_the_place(tmp_path: Path) -> None:
    path = copied(tmp_path, "small")
    before = opened("small", tmp_path).fingerprint()
    assert before == opened("small").fingerprint()
    content = bytearray((path / "chunk-0-1.bin").read_bytes())
    content[-1] ^= 1
    (path / "chunk-0-1.bin").write_bytes(content)
    assert opened("small", tmp_path).fingerprint() != before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": []}, r"index\.json is not an index of litdata"),
        ({"encryption": {"algorithm": "fernet"}}, r"small is encrypted: write it without encrypt"),
        ({"compression": "lz4"}, r'small is compressed with "lz4", not zstd'),
        ({"item_loader": "ParquetLoader"}, r'small is for "ParquetLoader": only PyTreeLoader, Tok'),
        ({"data_format": ["str", "video"]}, r'leaf 2 of a sample has the format "video", which is'),
        ({"data_format": ["str", "no_header_numpy:99"]}, r'has the format "no_header_numpy:99"'),
        ({"data_format": ["str"]}, r"data_spec has 2 leaves, data_format 1: copy it again"),
        ({"data_spec": "[1, {}]"}, r"index\.json: data_spec is .*: copy it again"),
        (
            {"data_spec": '[1, {"type": "a.Point", "context": "null", "children_spec": []}]'},
            r'small has samples with "a\.Point": write dicts, lists and tuples',
        ),
        ({"filename": "../chunk.bin"}, r'"\.\./chunk\.bin" leaves the directory: write it again'),
        ({"chunk_size": 22}, r"chunk-0-0\.bin has 23 samples, but 22 in index\.json: copy the dir"),
        ({"chunk_size": -1}, r"index\.json: a chunk is \{.*: copy it again"),
        ({"chunk_bytes": 5}, r"chunk-0-0\.bin has \d+ bytes, but 5 in index\.json: copy it again"),
    ],
)
def test_foreign_index_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = copied(tmp_path, "small") / "index.json"
    index = json.loads(file.read_text())
    for content in (index, index["config"], index["chunks"][0]):
        content.update({key: value for key, value in change.items() if key in content})
    file.write_text(json.dumps(index))
    with pytest.raises(UserError, match=message) as raised:
        samples = opened("small", tmp_path)
        _ = [samples[index] for index in range(len(samples))]
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "pickled",
            r"pickled: leaf 2 of a sample is a pickle, which is code: write arrays, string",
        ),
        ("tokens", r"LitSamples: .*tokens has tokens: add the length of a window"),
        ("small:3", r"LitSamples: .*small has samples, not tokens: omit the window"),
        ("tokens:0", r"LitSamples: a window has at least 1 token, not 0"),
        ("absent", r"LitSamples: .*absent has no index\.json"),
    ],
)
def test_what_is_not_read_is_named(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(name)


@pytest.mark.parametrize(
    ("name", "at", "message"),
    [
        ("small", 4, r"chunk-0-0\.bin is truncated or damaged: its offsets exceed it; copy it aga"),
        ("small", 101, r"chunk-0-0\.bin: sample 1 is damaged \(.*\): copy it again"),
        ("chunk", 40, r"chunk-0-0\.zstd\.bin cannot be decompressed \(.*copy it again"),
        ("batch", 8, r"chunk-0-0\.bin has frames of version 65535: only version 1 is read"),
        ("batch", 24 + 84 + 8, r"chunk-0-0\.bin is truncated or damaged: its frames do not fit"),
        ("batch", 24 + 84 + 72 + 4, r"chunk-0-0\.bin cannot be decompressed"),
        ("sample", 88 + 4, r"chunk-0-0\.bin cannot be decompressed"),
        ("rows", -30, r"chunk-0-0\.bin has no complete rows \(.*\): copy it again"),
        ("rows", 1262, r"chunk-0-0\.bin: sample 1 is damaged \(.*\): copy it again"),
    ],
)
def test_damaged_chunks_are_refused(tmp_path: Path, name: str, at: int, message: str) -> None:
    file = next(copied(tmp_path, name).glob("chunk-0-0*"))
    content = bytearray(file.read_bytes())
    at %= len(content)
    content[at : at + 4] = b"\xff" * 4
    file.write_bytes(content)
    samples = opened(name, tmp_path)
    with pytest.raises(UserError, match=message):
        _ = samples[0]


def test_truncated_chunks_are_refused(tmp_path: Path) -> None:
    for name in ("small", "tokens:8", "chunk", "tokens_zstd:5"):
        file = next(copied(tmp_path, name.partition(":")[0]).glob("chunk-0-0*"))
        file.write_bytes(file.read_bytes()[:-7])
        with pytest.raises(UserError, match=r"(bytes, but|decompressed) .*copy it again"):
            _ = opened(name, tmp_path)[0]


FLAGS = (
    "--run.id run --train.duration 5 --batch.global_size 8 --batch.micro_size 4 --telemetry.port 0"
    " --loader.order sequential --loader.shuffle_buffer 16 --loader.workers 0 --run.root runs"
)


def test_recipe_of_the_docs_trains_on_each_window_once(tmp_path: Path) -> None:
    page = (DOCS / "datasets.md").read_text()
    section = page.partition("## MDS and litdata")[2].partition("\n## ")[0]
    (script,) = re.findall(r"```python\n(import.*?)```", section, re.DOTALL)
    for old, new in (("1025", "7"), ("for tokens in step:", "for tokens in map(note, step):")):
        assert old in script
        script = script.replace(old, new)
    note = (
        "def note(tokens):\n    seen.extend(tokens[:, 0].tolist())\n    return tokens\nseen = []\n"
    )
    (tmp_path / "tokens.py").write_text(f"{note}{script}print('seen', seen)")
    shutil.copytree(DATA / "tokens", tmp_path / "lit")
    done = subprocess.run(
        [sys.executable, "tokens.py", *FLAGS.split()],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("seen ")]
    seen = json.loads(line.removeprefix("seen "))
    samples = opened("tokens:7")
    firsts = [int(samples[index][0]) for index in range(len(samples))]
    assert len(set(firsts)) == len(firsts) == 45
    assert len(seen) == len({*seen}) == 40 and {*seen} < {*firsts} and seen != sorted(seen)
