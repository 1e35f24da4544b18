"""Text and token files: file selection, validation split, and errors for bad files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.data.config import DataConfig
from hvdtrain.data.file_kinds import HEAD_BYTES
from hvdtrain.data.files import expand, hidden_copy, split_files, standard_library
from hvdtrain.data.packed import read_packed, read_text, text_files
from hvdtrain.data.text import Tokenizer, read
from hvdtrain.data.token_files import TokenMeta, read_token_files
from hvdtrain.data.tokenize import Source, tokenize
from hvdtrain.data.tokens import TokenWindows
from hvdtrain.errors import UserError
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.runtime.mpi import Alone
from hvdtrain.tasks.language_model import LanguageModel, LanguageModelConfig
from tests.support.runs import CORPUS


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """20 files a00.txt ... of 100 bytes each, two directories deep; one is empty."""
    for i in range(20):
        path = tmp_path / f"corpus/{i % 2}/a{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([65 + i]) * 100)
    (tmp_path / "corpus/empty.txt").touch()
    (tmp_path / "corpus/[odd]").mkdir()
    (tmp_path / "corpus/[odd]/b.md").write_text("x" * 10)
    return tmp_path / "corpus"


def _model(context: int, **data: object) -> LanguageModel:
    return LanguageModel(
        LanguageModelConfig(GPTConfig(context=context), DataConfig(**data))  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("patterns", "files"),
    [
        (["."], 21),
        (["*/*.txt"], 20),
        (["**/*.txt"], 20),
        (["0"], 10),
        (["0/a00.txt", "0/a0?.txt"], 5),
        (["[odd]"], 1),
    ],
)
def test_patterns_expand_to_sorted_unique_nonempty_files(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, patterns: list[str], files: int
) -> None:
    monkeypatch.chdir(corpus)
    found = expand("data.train", patterns)
    assert len(found) == len(set(found)) == files
    assert found == sorted(found) and all(path.stat().st_size for path in found)


@pytest.mark.parametrize("pattern", ["none/*.txt", "empty.txt", "nowhere"])
def test_missing_or_empty_input_is_named(corpus: Path, pattern: str) -> None:
    with pytest.raises(UserError, match=r"data\.train.*" + pattern.replace("*", r"\*")):
        expand("data.train", [str(corpus / "0"), str(corpus / pattern)])


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    # No user, including root, can read a path that leads through a file.
    (tmp_path / "file").write_text("text")
    with pytest.raises(UserError, match="file/below"):
        read(tmp_path / "file/below")


def test_invalid_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path / "tokenizer.json", tmp_path / "missing.json"):
        with pytest.raises(UserError, match=rf"data\.tokenizer: {path}"):
            Tokenizer(str(path))


@pytest.mark.parametrize("key", ["train", "validation"])
def test_too_short_input_is_named(corpus: Path, tmp_path: Path, key: str) -> None:
    short = tmp_path / "short.txt"
    short.write_text("x" * 50)
    paths = {"train": str(corpus), "validation": str(corpus), key: str(short)}
    with pytest.raises(UserError, match=rf"data\.{key}: 50 tokens \(from {short}\).*51"):
        _model(50, **paths).datasets()
    assert len(_model(49, **paths).datasets()._asdict()[key]) == 1


def test_too_short_validation_split_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("x" * 1000)
    with pytest.raises(UserError, match=r"data\.validation: 50 tokens \(from .*one\.txt\)"):
        _model(50, train=str(tmp_path / "one.txt")).datasets()


@settings(deadline=None, max_examples=40)
@given(count=st.integers(2, 30), fraction=st.floats(0.001, 0.999))
def test_split_is_complete_disjoint_and_never_empty(
    tmp_path_factory: pytest.TempPathFactory, count: int, fraction: float
) -> None:
    directory = tmp_path_factory.mktemp("split")
    paths = [directory / f"{i}.txt" for i in range(count)]
    for i, path in enumerate(paths):
        path.write_text("x" * (i + 1))
    train, validation = split_files(paths, fraction)
    assert train and validation and sorted(train + validation) == sorted(paths)


def test_split_does_not_depend_on_directory_or_file_order(corpus: Path, tmp_path: Path) -> None:
    paths = expand("data.train", [str(corpus / "0"), str(corpus / "1")])
    names = [[path.name for path in part] for part in split_files(paths, 0.2)]
    assert [[path.name for path in part] for part in split_files(paths[::-1], 0.2)] == names
    moved = corpus.rename(tmp_path / "elsewhere")
    there = expand("data.train", [str(moved / "0"), str(moved / "1")])
    assert [[path.name for path in part] for part in split_files(there, 0.2)] == names
    assert len(names[1]) == 4


def test_default_data_is_the_standard_library() -> None:
    names = {path.name for path in standard_library()}
    assert {"argparse.py", "subprocess.py", "typing.py"} <= names
    train, validation = text_files(DataConfig())
    sizes = [sum(path.stat().st_size for path in part) for part in (train, validation)]
    assert sizes[0] > 5 << 20
    assert 0.04 < sizes[1] / sum(sizes) < 0.08


def test_byte_tokens_equal_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "all-bytes"
    content = b"x" * HEAD_BYTES + bytes(range(256)) * 4  # a file that begins with NUL is not text
    path.write_bytes(content)
    train, validation = read_text(DataConfig(train=str(path)), Tokenizer(None))
    assert np.concatenate((train, validation)).tolist() == list(content)
    assert len(validation) == int(len(content) * 0.05)
    assert Tokenizer(None).decode([104, 195, 169, 300]) == "hé"


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6), context=st.integers(1, 12))
def test_windows_continue_across_array_boundaries(sizes: list[int], context: int) -> None:
    total = sum(sizes)
    arrays = np.split(np.arange(total, dtype=np.uint16), np.cumsum(sizes)[:-1])
    windows = TokenWindows(arrays, context)
    assert len(windows) == max(0, (total - 1) // context)
    for i in range(len(windows)):
        first = i * context
        assert windows[i].tolist() == list(range(first, first + context + 1))


def test_different_data_has_a_different_fingerprint() -> None:
    a, b = np.arange(300, dtype=np.uint16), np.arange(300, dtype=np.uint16)
    b[299] += 1
    prints = {
        TokenWindows(arrays, 8).fingerprint()
        for arrays in ([a], [b], [a[:-1]], [a[:100], a[100:]], [a.astype(np.uint32)])
    }
    assert len(prints) == 5
    assert TokenWindows([a.copy()], 8).fingerprint() in prints


def test_tokenizer_file_is_used_and_sets_the_vocabulary_size(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["[UNK]", "to", "be", "or", "not"]
    library = Library(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    library.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_bytes(b"to be or not to be  \xff " * 50)

    task = _model(4, train=str(tmp_path / "text"), tokenizer=str(tmp_path / "tokenizer.json"))
    datasets = task.datasets()
    assert datasets.train[0].tolist() == [1, 2, 3, 4, 1]
    assert task.model().embedding.num_embeddings == len(words)
    too_few = _model(4, train=str(tmp_path / "text"), tokenizer=str(tmp_path / "tokenizer.json"))
    too_few.config.model.vocab_size = 4
    with pytest.raises(UserError, match=r"model\.vocab_size 4 .* 5 tokens"):
        too_few.datasets()


def _train_tokenizer(kind: str, text: str) -> Any:
    import tokenizers as library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    kinds: dict[str, tuple[Any, ...]] = {
        "byte-level": (
            models.BPE(), trainers.BpeTrainer, pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet(),
        ),
        "unigram": (
            models.Unigram(), trainers.UnigramTrainer, pre_tokenizers.Metaspace(),
            decoders.Metaspace(), [],
        ),
        "byte fallback": (
            models.BPE(byte_fallback=True, unk_token="<unk>"), trainers.BpeTrainer,
            pre_tokenizers.Metaspace(),
            decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()]), [],
        ),
    }  # fmt: skip
    model, trainer, split, decoder, alphabet = kinds[kind]
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoder
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = special if kind == "byte fallback" else special[:2]
    options = {"unk_token": "<unk>"} if kind == "unigram" else {}
    made = trainer(
        vocab_size=600, special_tokens=tokens[:2], initial_alphabet=alphabet, **options
    )  # fmt: skip
    tokenizer.train_from_iterator([text], made)
    if kind == "byte fallback":
        facts = json.loads(tokenizer.to_str())
        for token in tokens[2:]:
            facts["model"]["vocab"][token] = len(facts["model"]["vocab"])
        tokenizer = library.Tokenizer.from_str(json.dumps(facts))
    return tokenizer


@pytest.mark.parametrize(
    ("tokens", "eos", "end"),
    [
        (["<EOS>"], "<EOS>", "<EOS>"),  # as in Command R
        (["</s>", "<eos>"], {"content": "<eos>"}, "<eos>"),  # as in Gemma, whose </s> is HTML
        (["<|endoftext|>", "<|im_end|>"], "<|im_end|>", "<|endoftext|>"),  # as in Qwen
        (["<EOS>"], None, None),
        (["</s>"], "<unknown>", "</s>"),
    ],
)
def test_documents_end_with_the_end_token_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: list[str], eos: Any, end: str | None
) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel

    path = tmp_path / "tokenizer.json"
    library = Library(WordLevel({"ab": 0, "<unk>": 1}, unk_token="<unk>"))
    library.add_special_tokens(tokens)
    library.save(str(path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n' * 40)
    config = DataConfig(source="jsonl", train=str(tmp_path / "a.jsonl"), tokenizer=str(path))
    warnings: list[tuple[str, ...]] = []
    monkeypatch.setattr("hvdtrain.data.packed.logger.warning", lambda *said: warnings.append(said))
    found = read_packed(config, Tokenizer(str(path)))
    assert len(warnings) == (end is None) and all("separates" in said[0] for said in warnings)
    document = [*library.encode("ab").ids, *([library.token_to_id(end)] if end else [])]
    assert found.train[0][:9].tolist() == (document * 9)[:9]


def test_broken_configuration_of_a_tokenizer_is_reported(tmp_path: Path) -> None:
    _train_tokenizer("byte-level", "a b").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: Expecting property name"):
        Tokenizer(str(tmp_path / "tokenizer.json")).separator("jsonl", separate=False)


@pytest.mark.parametrize("kind", ["byte-level", "unigram", "byte fallback"])
def test_bytes_of_tokens_add_up_to_the_bytes_of_the_text(tmp_path: Path, kind: str) -> None:
    text = CORPUS.read_text()[:20000]
    text = "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())
    if kind == "unigram":
        text = " ".join(text.split())
    _train_tokenizer(kind, text).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(str(tmp_path / "tokenizer.json"))
    sizes = tokenizer.meta.bytes_of_tokens()
    assert sizes is not None and len(sizes) == tokenizer.vocab_size
    if kind != "unigram":
        text += " größer ✓"  # not in its training text
    # SentencePiece puts a space before the text.
    added = 0 if kind == "byte-level" else 1
    assert sizes[tokenizer.encode(text.encode())].sum() == len(text.encode()) + added
    assert tokenizer.end is not None and sizes[tokenizer.end] == 0
    assert replace(tokenizer.meta, separator=40).bytes_of_tokens()[40] == 0  # type: ignore[index]


@pytest.mark.parametrize("several", [True, False])
def test_each_file_is_one_document_for_the_mask(tmp_path: Path, several: bool) -> None:
    files = [f"a file of {name} " * 30 for name in ("one", "two", "three")][: 3 if several else 1]
    for number, text in enumerate(files):
        (tmp_path / f"{number}.txt").write_text(text)
    task = _model(12, train=str(tmp_path), document_mask=True, validation_fraction=0.3)
    train, validation, *_ = task.datasets()
    assert validation is not None
    arrays = [*train.arrays, *validation.arrays]  # type: ignore[attr-defined]
    whole = np.concatenate(arrays).tobytes().decode()
    assert sorted(whole.split("\0")) == ["", *sorted(files)]
    tokens = torch.tensor([[5, 0, 3, 0, 0], [1, 1, 1, 1, 0]])
    model = task.model()
    documents = torch.tensor([[0, 1, 1, 2], [0, 0, 0, 0]])
    expected = model.loss(tokens[:, :-1], tokens[:, 1:], documents)
    assert torch.equal(task.loss(model, tokens)["loss"], expected)
    without = _model(12, train=str(tmp_path))
    without.datasets()
    expected = model.loss(tokens[:, :-1], tokens[:, 1:])
    assert torch.equal(without.loss(model, tokens)["loss"], expected)
    assert without.validation_metrics == task.validation_metrics == ("bits_per_byte",)


def test_document_mask_requires_a_separator(tmp_path: Path) -> None:
    _token_file(tmp_path / "train.u16", 300)
    data: dict[str, Any] = {"train": str(tmp_path / "train.u16"), "document_mask": True}
    with pytest.raises(UserError, match=r"data\.document_mask .*tokenize --separate"):
        _model(12, source="tokens", **data).datasets()
    TokenMeta(500, "my.json", separator=7).write(tmp_path)
    task = _model(12, source="tokens", **data)
    task.datasets()
    assert task.validation_metrics == ()  # tokens.json has no bytes
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel

    Library(WordLevel({"to": 0}, unk_token="to")).save(str(tmp_path / "words.json"))
    data |= {"train": str(CORPUS), "tokenizer": str(tmp_path / "words.json")}
    with pytest.raises(UserError, match=r"words\.json has no end-of-document token"):
        _model(12, **data).datasets()


def _token_file(path: Path, tokens: int, vocab_size: int = 500) -> None:
    path.parent.mkdir(exist_ok=True)
    np.arange(tokens, dtype="<u2" if path.suffix == ".u16" else "<u4").tofile(path)
    TokenMeta(vocab_size, "bytes").write(path.parent)


def test_token_files_are_memory_mapped(tmp_path: Path) -> None:
    _token_file(tmp_path / "train.u16", 300)
    _token_file(tmp_path / "wide/train.u32", 200)
    arrays, meta = read_token_files("data.train", [str(tmp_path / "*.u16"), str(tmp_path / "wide")])
    assert all(isinstance(np.asarray(array[:9]).base.base, np.memmap) for array in arrays)
    assert [np.asarray(array).tolist() for array in arrays] == [list(range(300)), list(range(200))]
    assert meta == TokenMeta(500, "bytes")
    task = _model(12, source="tokens", train=str(tmp_path / "train.u16"))
    assert len(task.datasets().train) == (285 - 1) // 12  # type: ignore[arg-type]
    assert task.model().embedding.num_embeddings == 500


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("suffix", r"train\.txt is not a token file"),
        ("odd size", r"data\.train: .*odd\.u16"),
        ("no meta", "there is no tokens.json next to it"),
        ("two tokenizers", "different tokenizers"),
        ("empty", "empty"),
    ],
)
def test_invalid_token_file_is_refused_with_the_reason(
    tmp_path: Path, case: str, message: str
) -> None:
    patterns = [str(tmp_path / "a")]
    _token_file(tmp_path / "a/train.u16", 300)
    if case == "suffix":
        (tmp_path / "a/train.txt").write_text("text")
        patterns = [str(tmp_path / "a/train.txt")]
    elif case == "odd size":
        (tmp_path / "a/odd.u16").write_bytes(b"123")
    elif case == "no meta":
        (tmp_path / "a/tokens.json").unlink()
    elif case == "two tokenizers":
        _token_file(tmp_path / "b/more.u16", 300, vocab_size=400)
        patterns.append(str(tmp_path / "b"))
    else:
        (tmp_path / "a/train.u16").write_bytes(b"")
    with pytest.raises(UserError, match=message):
        read_token_files("data.train", patterns)


def test_token_cache_is_reused_until_text_or_split_changes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(**keys: Any) -> tuple[list[int], list[int]]:
        config = DataConfig(train=[str(corpus)], cache=str(tmp_path / "cache"), **keys)
        train, validation = read_text(config, Tokenizer(None))
        assert isinstance(train, np.memmap)
        return train.tolist(), validation.tolist()

    def plain(**keys: Any) -> tuple[list[int], list[int]]:
        found = read_text(DataConfig(train=[str(corpus)], **keys), Tokenizer(None))
        return found[0].tolist(), found[1].tolist()

    assert read() == plain() and read(validation_fraction=0.5) == plain(validation_fraction=0.5)
    with monkeypatch.context() as patch:
        patch.setattr("hvdtrain.data.packed.encode_file", None)  # no token can be produced
        patch.setattr("hvdtrain.data.packed.check_text", None)  # no file is opened
        read()
    next(corpus.rglob("*.txt")).write_text("something else")
    assert read() == plain()
    assert len(list((tmp_path / "cache").iterdir())) == 3
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache: .*file"):
        read_text(DataConfig(train=[str(corpus)], cache=str(tmp_path / "file")), Tokenizer(None))


_KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from hvdtrain.data import packed

def write(directory, tokens):
    np.save(directory / "train.npy", tokens[0])
    os.kill(os.getpid(), signal.SIGKILL)

packed._write = write
packed.cached(Path(sys.argv[1]), "0123456789abcdef", lambda: (np.zeros(9999), np.zeros(9)))
"""


def test_cache_copy_of_a_killed_process_is_removed(corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    done = subprocess.run([sys.executable, "-c", _KILLED, str(cache)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = cache.glob(".*.tmp")
    living = left.with_name(left.name.replace("0123", "fedc"))
    living.mkdir()
    with hidden_copy(living):
        read_text(DataConfig(train=[str(corpus)], cache=str(cache)), Tokenizer(None))
        assert living.is_dir() and not left.exists()
    (kept,) = cache.iterdir()  # no lock is left either
    assert not kept.name.startswith(".")


def test_damaged_cache_file_is_named_with_what_to_delete(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(train=[str(corpus)], cache=str(tmp_path / "cache"))
    read_text(config, Tokenizer(None))
    (kept,) = (tmp_path / "cache").iterdir()
    for content in (b"", b"no array", (kept / "train.npy").read_bytes()[:200]):
        (kept / "train.npy").write_bytes(content)
        with pytest.raises(UserError, match=f"train.npy cannot be read .*: delete .* {kept},"):
            read_text(config, Tokenizer(None))


@pytest.mark.parametrize(
    ("files", "refused"),
    [
        ({"a.jsonl": '{"text": "a"}\n' * 9}, "a.jsonl is a file of JSON lines"),
        ({"a.ndjson": '{"body": "a"}\n' * 9, "README.md": "a"}, "a.ndjson is a file of JSON lines"),
        ({"a.jsonl": "plain text\n" * 9}, ""),
        ({"a.txt": '{"text": "a"}\n' * 9}, ""),
        ({"a.jsonl": '{"text": "a"}\n' * 9, "a.txt": "a" * 999}, ""),
        ({"a.parquet": "PAR1 ... PAR1" * 9}, "a.parquet is a Parquet file"),
    ],
)
def test_json_lines_and_parquet_are_refused_as_plain_text(
    tmp_path: Path, files: dict[str, str], refused: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    source = Source([str(tmp_path)])
    if not refused:
        assert text_files(DataConfig(train=[str(tmp_path)]))[0]
        tokenize(source, tmp_path / "out", Alone())
        return
    kind = "parquet" if "Parquet" in refused else "jsonl"
    for key in ("data.train", "data.validation"):
        config = DataConfig(**{"train": [], key.removeprefix("data."): [str(tmp_path)]})  # type: ignore[arg-type]
        with pytest.raises(UserError, match=rf"{key}: .*{refused}.*data\.source {kind}"):
            text_files(config)
    with pytest.raises(UserError, match=f"--input: .*{refused}.*--source {kind}, and --text-key"):
        tokenize(source, tmp_path / "out", Alone())
