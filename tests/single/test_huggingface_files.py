"""Files of the task `huggingface` that are compressed, binary, or have text that is not Unicode."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from hvdtrain.data.config import DataConfig
from hvdtrain.errors import UserError
from hvdtrain.tasks.huggingface import HuggingFace
from hvdtrain.tasks.huggingface_config import HuggingFaceConfig, HuggingFaceTaskConfig
from tests.support.transformer_directories import add_template, chats, make, write


def _compressed(root: Path) -> None:
    (root / "a.jsonl.gz").write_bytes(gzip.compress(chats(root / "a.jsonl").read_bytes()))
    (root / "a.jsonl").unlink()


def _half_compressed(root: Path) -> None:
    (root / "b.jsonl.gz").write_bytes(gzip.compress(chats(root / "a.jsonl").read_bytes()))


def _saved_to_disk(root: Path) -> None:
    table = pa.table({"text": ["the work"] * 999})
    with pa.ipc.new_stream(root / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (root / "state.json").write_text("{}")


def _cut_character(root: Path) -> None:
    write(root / "a.jsonl", [{"prompt": "the work", "completion": "cut \ud83d"}] * 9)


def _task(tmp_path: Path, **keys: str) -> HuggingFace:
    model = add_template(make(tmp_path / "model", "llama"))
    own = HuggingFaceConfig(model=str(model), context=64)
    data = DataConfig(train=[str(tmp_path / "data")], **keys)  # type: ignore[arg-type]
    return HuggingFace(HuggingFaceTaskConfig(own, data=data))


def test_text_of_a_nested_key_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data/a.jsonl", [{"doc": {"body": "the work"}}] * 999)
    datasets = _task(tmp_path, text_key="doc.body").datasets()
    assert datasets.format == "text" and len(datasets.train) > 10  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make_data", "message"),
    [
        (_compressed, r"a\.jsonl\.gz is compressed with gzip: decompress it with `gunzip"),
        (_half_compressed, r"a\.jsonl is a file of .*, and .*b\.jsonl\.gz is compressed with gzip"),
        (_saved_to_disk, r"00001\.arrow is an Arrow file: convert it .*load_from_disk"),
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
