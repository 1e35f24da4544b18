"""Token files of other programs, written by these programs, or as their code describes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from hvdtrain.data.config import DataConfig
from hvdtrain.data.token_files import FileTokens, TokenMeta, read_token_files
from hvdtrain.data.tokens import TokenWindows
from hvdtrain.errors import UserError
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.tasks.language_model import LanguageModel, LanguageModelConfig
from tests.support.runs import losses, train

VOCAB_SIZE = 120
_RANDOM = np.random.default_rng(0)
DOCUMENTS = [_RANDOM.integers(0, VOCAB_SIZE, size) for size in (7, 300, 41, 1, 1500, 150)]
TOKENS = np.concatenate(DOCUMENTS)
NUMBERS = np.repeat(np.arange(len(DOCUMENTS)), [len(document) for document in DOCUMENTS])


def megatron(file: Path, dtype: Any = np.uint16, parts: int = 1) -> None:
    """Write a file and its index; `parts`: sequences of each document."""
    builder = IndexedDatasetBuilder(str(file), dtype=dtype)
    for document in DOCUMENTS:
        lengths = [len(part) for part in np.array_split(document, min(parts, len(document)))]
        builder.add_document(torch.from_numpy(document), lengths)
    builder.finalize(str(file.with_suffix(".idx")))


def datatrove(file: Path, token_size: int = 2, **more: Any) -> None:
    writer = TokenizedFile(str(file.parent), file.name, token_size=token_size, **more)
    for document in DOCUMENTS:
        writer.write(document.tolist(), None)
    writer.close()


def datatrove_megatron(file: Path, token_size: int) -> None:
    writer = MegatronTokenizedFile(str(file.parent), file.stem, token_size=token_size)
    for document in DOCUMENTS:
        writer.write(document.tolist())
    writer.close()


def llm_c(file: Path, wide: bool = False) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = (20240801, 7, len(TOKENS)) if wide else (20240520, 1, len(TOKENS))
    file.write_bytes(header.tobytes() + TOKENS.astype("<u4" if wide else "<u2").tobytes())


def raw(file: Path, dtype: str) -> None:
    TOKENS.astype(dtype).tofile(file)
    describe(file.parent, dtype=np.dtype(dtype).name)


def describe(directory: Path, **more: Any) -> None:
    facts = {"vocab_size": VOCAB_SIZE, "tokenizer": "words", **more}
    (directory / "tokens.json").write_text(json.dumps(facts))


def _numpy(file: Path, dtype: str) -> None:
    np.save(file, TOKENS.astype(dtype))


def saved(directory: Path) -> None:
    """Rows of tokens, and of masks, as tokenizers return them."""
    rows = {"input_ids": DOCUMENTS, "attention_mask": [np.ones_like(d) for d in DOCUMENTS]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(directory))
    describe(directory)


def fixed(file: Path) -> None:
    """Rows of equal length in several batches."""
    rows = pa.FixedSizeListArray.from_arrays(pa.array(TOKENS[:1990].astype(np.int32)), 199)
    table = pa.table({"words": rows})
    with pa.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    **{
        f"Megatron {np.dtype(dtype).name}": ("a.bin", lambda file, d=dtype: megatron(file, d))
        for dtype in (np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16)
    },
    "Megatron, several sequences": ("a.bin", lambda file: megatron(file, parts=3)),
    "datatrove": ("a.ds", lambda f: datatrove(f, 2, save_final_metadata=True)),
    "datatrove, 4 bytes": ("a.ds", lambda f: datatrove(f, 4, save_final_metadata=True)),
    "datatrove for Megatron": ("a.bin", lambda file: datatrove_megatron(file, 2)),
    "datatrove for Megatron, 4 bytes": ("a.bin", lambda file: datatrove_megatron(file, 4)),
    "llm.c": ("a.bin", llm_c),
    "llm.c, Llama 3": ("a.bin", lambda file: llm_c(file, wide=True)),
    "nanoGPT": ("a.bin", lambda file: raw(file, "<u2")),
    "OLMo-core": ("a.npy", lambda file: raw(file, "<u4")),
    "Arrow of datasets": ("saved", lambda file: saved(file)),
    "Arrow, fixed lengths": ("a.arrow", fixed),
    "numpy uint16": ("a.npy", lambda file: _numpy(file, "<u2")),
    "numpy int64": ("a.npy", lambda file: _numpy(file, "<i8")),
    "numpy, big-endian": ("a.npy", lambda file: _numpy(file, ">u4")),
}
WITH_DOCUMENTS = [
    name for name in WRITERS if name.startswith(("Megatron", "datatrove", "Arrow of"))
]


def opened(name: str, directory: Path) -> FileTokens:
    file, write = WRITERS[name]
    describe(directory)
    write(directory / file)
    (found,), meta = read_token_files("data.train", [str(directory / file)])
    assert meta == TokenMeta(VOCAB_SIZE, "words")
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_tokens_are_those_that_the_writer_was_given(tmp_path: Path, name: str) -> None:
    found = opened(name, tmp_path)
    tokens = TOKENS[: len(found)]
    assert len(tokens) >= 1990 and np.asarray(found).tolist() == tokens.tolist()
    assert np.asarray(found[30:-7][5:50]).tolist() == TOKENS[35:80].tolist()
    assert found.has_documents == (name in WITH_DOCUMENTS or name.startswith("Arrow"))
    windows = TokenWindows([found, found], 77, VOCAB_SIZE)
    twice = np.concatenate([tokens, tokens])
    for number in range(len(windows)):
        assert windows[number].tolist() == twice[number * 77 : number * 77 + 78].tolist()


@pytest.mark.parametrize("name", WITH_DOCUMENTS)
def test_borders_of_documents_are_those_of_the_writer(tmp_path: Path, name: str) -> None:
    found = opened(name, tmp_path)
    assert found.documents().tolist() == NUMBERS.tolist()
    for start, stop in ((0, 7), (6, 8), (7, 348), (348, 350), (900, 1999)):
        numbers = NUMBERS[start:stop]
        assert found[start:stop].documents().tolist() == (numbers - numbers[0]).tolist()


def test_tokens_are_those_of_megatrons_own_reader(tmp_path: Path) -> None:
    found = opened("Megatron, several sequences", tmp_path)
    reader = IndexedDataset(str(tmp_path / "a"))
    sequences = [reader[number] for number in range(len(reader))]
    assert np.asarray(found).tolist() == np.concatenate(sequences).tolist()
    lengths = np.add.reduceat(reader.sequence_lengths, reader.document_indices[:-1])
    assert np.bincount(found.documents()).tolist() == lengths.tolist()


def test_windows_number_the_documents_across_files(tmp_path: Path) -> None:
    describe(tmp_path)
    for name in ("a.bin", "b.bin"):
        megatron(tmp_path / name)
    arrays, _ = read_token_files("data.train", [str(tmp_path / "*.bin")])
    context = 64
    windows = TokenWindows(arrays, context, VOCAB_SIZE, documents=True)
    tokens = np.concatenate([TOKENS, TOKENS])
    numbers = np.concatenate([NUMBERS, NUMBERS + len(DOCUMENTS)])
    assert len(windows) == (len(tokens) - 1) // context
    for sample in range(len(windows)):
        part = slice(sample * context, (sample + 1) * context + 1)
        expected = [tokens[part], numbers[part] - numbers[part][0]]
        assert windows[sample].tolist() == np.stack(expected).tolist()


def test_document_mask_takes_the_borders_from_an_index(tmp_path: Path) -> None:
    """The loss of a document does not depend on the other documents of its sample."""
    describe(tmp_path)
    megatron(tmp_path / "a.bin")
    task = LanguageModel(_config(tmp_path / "a.bin", document_mask=True))
    windows: Any = task.datasets().train
    torch.manual_seed(0)
    model = task.model().eval()
    sample = next(s for s in map(windows.__getitem__, range(len(windows))) if s[1, -2] == 1)
    border = int((sample[1] == 0).sum())
    logits = model(sample[None, 0, :-1], sample[None, 1, :-1])[0, border:]
    alone = model(sample[None, 0, border:-1])[0]
    torch.testing.assert_close(logits, alone)
    assert not torch.allclose(model(sample[None, 0, :-1])[0, border:], alone)
    assert torch.isfinite(task.loss(model, torch.stack([sample, sample]))["loss"])


def _config(file: Path, **data: Any) -> LanguageModelConfig:
    data = {"source": "tokens", "train": str(file), **data}
    return LanguageModelConfig(
        GPTConfig(layers=1, heads=2, width=16, context=64), DataConfig(**data)
    )


def test_run_on_a_file_of_megatron_equals_one_on_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    describe(tmp_path)
    describe(tmp_path / "own")
    megatron(tmp_path / "a.bin", np.int32)
    TOKENS.astype("<u2").tofile(tmp_path / "own/a.u16")
    curves = []
    for file in ("a.bin", "own/a.u16"):
        flags = f"--data.source tokens --data.train {tmp_path / file} --train.duration 4"
        curves.append(losses(train(tmp_path / "runs", file[0], flags.split())))
    assert curves[0] == curves[1] and len(curves[0]) == 4


def test_data_tokenizer_describes_files_without_tokens_json(tmp_path: Path) -> None:
    tokenizer = _words(tmp_path / "words.json", VOCAB_SIZE)
    megatron(tmp_path / "a.bin")
    task = LanguageModel(_config(tmp_path / "a.bin", tokenizer=tokenizer))
    assert len(task.datasets().train) > 0  # type: ignore[arg-type]
    assert task.model().embedding.num_embeddings == VOCAB_SIZE
    describe(tmp_path, vocab_size=VOCAB_SIZE + 1, tokenizer="others")
    task = LanguageModel(_config(tmp_path / "a.bin", tokenizer=tokenizer))
    with pytest.raises(UserError, match=r"data\.tokenizer is words\.json with 120 .* others with"):
        task.datasets()


def _words(file: Path, size: int) -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({f"w{number}": number for number in range(size)}, "w0")).save(str(file))
    return str(file)


def test_index_and_separators_give_the_same_loss(tmp_path: Path) -> None:
    """Documents that end with the separator; the last ones are empty."""
    (tmp_path / "other").mkdir()
    documents = [np.append(1 + document[:200] % 100, 0) for document in DOCUMENTS]
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document), [len(document)])
    for _ in range(2):
        builder.add_document(torch.zeros(0, dtype=torch.int64), [])
    builder.finalize(str(tmp_path / "a.idx"))
    np.concatenate(documents).astype("<u2").tofile(tmp_path / "other/a.u16")
    found = []
    for directory, file in ((tmp_path, "a.bin"), (tmp_path / "other", "a.u16")):
        describe(directory, separator=0)
        task = LanguageModel(_config(directory / file, document_mask=True, validation_fraction=0.4))
        windows: Any = task.datasets().train
        torch.manual_seed(0)
        model = task.model().eval()
        samples = torch.stack([windows[number] for number in range(len(windows))])
        found.append((samples.dim(), float(task.loss(model, samples)["loss"])))
    assert [dims for dims, _ in found] == [3, 2] and found[0][1] == found[1][1]


def _without_json(directory: Path) -> None:
    megatron(directory / "a.bin")
    (directory / "tokens.json").unlink()


def _without_dtype(directory: Path) -> None:
    raw(directory / "a.bin", "<u2")
    describe(directory)


def _without_size(directory: Path) -> None:
    datatrove(directory / "a.ds")


def _shorter(directory: Path) -> None:
    megatron(directory / "a.bin")
    content = (directory / "a.bin").read_bytes()
    (directory / "a.bin").write_bytes(content[:-200])


def _other_index(directory: Path) -> None:
    megatron(directory / "a.bin", np.int32)
    (directory / "a.bin").write_bytes(TOKENS.astype("<u2").tobytes())


def _short_index(directory: Path) -> None:
    megatron(directory / "a.bin")
    index = directory / "a.idx"
    index.write_bytes(index.read_bytes()[:60])


def _damaged_index(directory: Path) -> None:
    megatron(directory / "a.bin")
    content = bytearray((directory / "a.idx").read_bytes())
    content[-8:] = (99).to_bytes(8, "little")  # the number of sequences
    (directory / "a.idx").write_bytes(content)


def _short_ds(directory: Path) -> None:
    datatrove(directory / "a.ds", save_final_metadata=True)
    (directory / "a.ds").write_bytes((directory / "a.ds").read_bytes()[:-200])


def _short_ds_index(directory: Path) -> None:
    datatrove(directory / "a.ds", save_final_metadata=True)
    index = directory / "a.ds.index"
    index.write_bytes(index.read_bytes()[:11])


def _damaged_numpy(directory: Path) -> None:
    _numpy(directory / "a.npy", "<u2")
    content = bytearray((directory / "a.npy").read_bytes())
    content[8:10] = (20).to_bytes(2, "little")  # bytes of the header
    (directory / "a.npy").write_bytes(content)


def _floats(directory: Path) -> None:
    megatron(directory / "a.bin", np.float32)


def _newer_llm_c(directory: Path) -> None:
    llm_c(directory / "a.bin")
    content = bytearray((directory / "a.bin").read_bytes())
    content[4] = 99
    (directory / "a.bin").write_bytes(content)


def _truncated_llm_c(directory: Path) -> None:
    llm_c(directory / "a.bin")
    (directory / "a.bin").write_bytes((directory / "a.bin").read_bytes()[:-2])


def _text_rows(directory: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"] * 9}).save_to_disk(str(directory / "saved"))
    describe(directory / "saved")


def _null_rows(directory: Path) -> None:
    datasets.Dataset.from_dict({"tokens": [[1, 2], None]}).save_to_disk(str(directory / "saved"))
    describe(directory / "saved")


def _large_rows(directory: Path) -> None:
    datasets.Dataset.from_dict({"tokens": [[1, 2], [120]]}).save_to_disk(str(directory / "saved"))
    describe(directory / "saved")


def _matrix(directory: Path) -> None:
    np.save(directory / "a.npy", TOKENS[:1000].reshape(10, 100))


def _torch(directory: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, directory / "a.bin")


def _negative(directory: Path) -> None:
    np.save(directory / "a.npy", np.where(np.arange(999) == 5, -100, TOKENS[:999]))


def _large(directory: Path) -> None:
    np.save(directory / "a.npy", TOKENS + 60)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_without_json, r"a\.bin: there is no tokens\.json next to it\. Name .* data\.tokenizer"),
        (_without_dtype, r'a\.bin does not tell the size of its tokens: .*"dtype": "uint16"'),
        (_without_size, r"a\.ds does not tell the size of its tokens"),
        (_shorter, r"a\.bin has 3798 bytes of tokens, 2 bytes each, and should have 1999 tokens"),
        (_other_index, r"a\.bin has 3998 bytes of tokens, 4 bytes each"),
        (_short_index, r"a\.bin: its \*\.idx is truncated"),
        (_damaged_index, r"a\.bin: its \*\.idx is damaged"),
        (_short_ds, r"a\.ds has 3798 bytes of tokens, 2 bytes each, and should have 1999 tokens"),
        (_short_ds_index, r"a\.ds: \*\.index next to it is truncated"),
        (_damaged_numpy, r"a\.npy: its header is damaged"),
        (_floats, r"a\.bin: its \*\.idx has an unknown version or dtype"),
        (_newer_llm_c, r"a\.bin: a token file of llm\.c of the unknown version 99"),
        (_truncated_llm_c, r"a\.bin has 3996 bytes of tokens, 2 bytes each, and should have 1999"),
        (_text_rows, r"00001\.arrow has no column input_ids or tokens with lists of .*only text"),
        (_null_rows, r"00001\.arrow: tokens has null: remove such rows"),
        (_large_rows, r"00001\.arrow: token 120 is outside the vocabulary of 120 tokens"),
        (_matrix, r"a\.npy: an array of shape \(10, 100\) and dtype int64: tokens are"),
        (_torch, r"a\.bin is a file of torch\.save"),
        (_negative, r"a\.npy: token -100 is outside the vocabulary of 120 tokens"),
        (_large, r"a\.npy: token 1\d\d is outside the vocabulary of 120 tokens"),
    ],
)
def test_file_that_cannot_be_read_is_refused_with_the_reason(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    describe(tmp_path)
    write(tmp_path)
    with pytest.raises(UserError, match=f"data.train: .*{message}|^.*{message}"):
        read_token_files("data.train", [str(tmp_path)])


def test_negative_token_is_refused_when_it_is_read(tmp_path: Path) -> None:
    describe(tmp_path)
    tokens = np.tile(TOKENS, 9)
    tokens[12_000] = -1
    np.save(tmp_path / "a.npy", tokens)
    arrays, meta = read_token_files("data.train", [str(tmp_path)])
    windows = TokenWindows(arrays, 100, meta.vocab_size)
    assert windows[3].min() >= 0
    with pytest.raises(UserError, match=r"a\.npy: token -1 is outside"):
        _ = windows[120]


def test_loss_mask_of_datatrove_is_named(tmp_path: Path, caplog: Any) -> None:
    describe(tmp_path, dtype="uint16")
    writer = TokenizedFile(str(tmp_path), "a.ds", save_loss_metadata=True)
    for document in DOCUMENTS:
        writer.write(document.tolist(), np.ones(len(document), bool))
    writer.close()
    read_token_files("data.train", [str(tmp_path)])
    assert "skipped" not in caplog.text
    assert "the loss mask next to it is not used" in caplog.text
