"""Files of the task `huggingface` that are compressed, binary, or have text that is not Unicode."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from hvdtrain.data.config import DataConfig
from hvdtrain.data.token_files import TokenMeta
from hvdtrain.errors import UserError
from hvdtrain.tasks.huggingface import HuggingFace
from hvdtrain.tasks.huggingface_config import HuggingFaceConfig, HuggingFaceTaskConfig
from tests.support.transformer_directories import add_template, chats, make, write


def _half_compressed(root: Path) -> None:
    packed = pa.compress(chats(root / "a.jsonl").read_bytes(), "lz4", asbytes=True)
    (root / "b.jsonl.lz4").write_bytes(packed)


def _saved_to_disk(root: Path) -> None:
    table = pa.table({"text": ["the work"] * 999})
    with pa.ipc.new_stream(root / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (root / "state.json").write_text("{}")


def _cut_character(root: Path) -> None:
    write(root / "a.jsonl", [{"prompt": "the work", "completion": "cut \ud83d"}] * 9)


def _task(tmp_path: Path, directory: str = "data", **keys: Any) -> HuggingFace:
    model = add_template(make(tmp_path / "model", "llama"))
    own = HuggingFaceConfig(model=str(model), context=64, truncate=True)
    data = DataConfig(train=[str(tmp_path / directory)], **keys)
    return HuggingFace(HuggingFaceTaskConfig(own, data=data))


def test_text_of_a_nested_key_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data/a.jsonl", [{"doc": {"body": "the work"}}] * 999)
    found = _task(tmp_path, text_key="doc.body").datasets()
    assert found.format == "text" and len(found.train) > 10  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make_data", "message"),
    [
        (_half_compressed, r"a\.jsonl is a file of .*, and .*b\.jsonl\.lz4 is compressed with LZ4"),
        (_saved_to_disk, r"00001\.arrow is a file of Arrow rows, .*; set data\.source arrow"),
        (_cut_character, r"a\.jsonl: line \d has half of a character, \\ud83d"),
    ],
)
def test_unusable_file_is_refused_with_one_line(
    tmp_path: Path, make_data: Callable[[Path], None], message: str
) -> None:
    (tmp_path / "data").mkdir()
    make_data(tmp_path / "data")
    with pytest.raises(UserError, match=message) as raised:
        _task(tmp_path).datasets()
    assert "\n" not in str(raised.value)


def _gz(file: Path, rows: list[dict[str, Any]]) -> None:
    file.with_name("a.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))


def _parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    datasets.Dataset.from_list(rows).to_parquet(str(file.with_name("a.parquet")))


def _arrow(file: Path, rows: list[dict[str, Any]]) -> None:
    datasets.Dataset.from_list(rows).save_to_disk(str(file.parent / "saved"), num_shards=2)


@pytest.mark.parametrize(
    ("convert", "source"), [(_gz, "text"), (_parquet, "parquet"), (_arrow, "arrow")]
)
def test_chats_in_other_files_are_those_of_json_lines(
    tmp_path: Path, convert: Callable[..., None], source: str
) -> None:
    """A table has all keys in each row: the weight of most messages is null there."""
    (tmp_path / "data").mkdir()
    file = chats(tmp_path / "data/a.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[::2]:
        row["messages"].append({"role": "assistant", "content": "you", "weight": 0})
    write(file, rows)
    of_lines = _samples(_task(tmp_path).datasets())
    convert(file, rows)
    file.unlink()
    found = _task(tmp_path, source=source).datasets()
    assert _samples(found) == of_lines and found.format == "chat" and len(of_lines) == 60


def _samples(found: Any) -> list[list[list[int]]]:
    samples = [data[number] for data in found[:2] for number in range(len(data))]
    return [[torch.as_tensor(part).tolist() for part in sample] for sample in samples]


def test_row_that_is_no_chat_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [json.loads(line) for line in chats(tmp_path / "a.jsonl").read_text().splitlines()]
    rows[40] = {"messages": [{"role": "user", "content": "the work"}]}
    _parquet(tmp_path / "data/a.jsonl", rows)
    with pytest.raises(UserError, match=r"a\.parquet: row 41: no message of the assistant"):
        found: Any = _task(tmp_path, source="parquet").datasets()
        _ = [data[number] for data in found[:2] for number in range(len(data))]


def test_borders_of_an_index_separate_documents(tmp_path: Path) -> None:
    """The targets and positions are those of the same tokens with separators."""
    (tmp_path / "data").mkdir()
    (tmp_path / "other").mkdir()
    random = np.random.default_rng(0)
    documents = [np.append(random.integers(3, 60, size), 1) for size in (400, 3, 900, 20, 777)]
    builder = IndexedDatasetBuilder(str(tmp_path / "data/a.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(tmp_path / "data/a.idx"))
    np.concatenate(documents).astype("<u2").tofile(tmp_path / "other/a.u16")
    TokenMeta(60, "words", separator=1).write(tmp_path / "other")
    losses = []
    for directory in ("data", "other"):
        task = _task(tmp_path, directory, source="tokens", document_mask=True)
        samples: Any = task.datasets().validation or task.datasets().train
        torch.manual_seed(0)
        model = task.model().eval()
        batch = task.collate([samples[number] for number in range(len(samples))])
        total, count = task.loss(model, batch)["loss"]
        losses.append((float(total), int(count)))
    assert losses[0] == losses[1]
