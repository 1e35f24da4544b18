"""Files whose content is not what their name or data.source says, made by their usual writers."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import logging
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save

from hvdtrain.data.config import DataConfig
from hvdtrain.data.file_kinds import check_text
from hvdtrain.data.files import expand, find_files
from hvdtrain.data.packed import read_packed, read_text
from hvdtrain.data.parquet import ParquetRows
from hvdtrain.data.records import JSON_LINES, JsonLines, TarShards
from hvdtrain.data.tables import open_table
from hvdtrain.data.text import Tokenizer
from hvdtrain.data.token_files import TokenMeta, read_token_files
from hvdtrain.data.token_formats import DTYPES
from hvdtrain.data.tokenize import Source, tokenize
from hvdtrain.errors import UserError
from hvdtrain.runtime.mpi import Alone
from tests.support.ranged_http import serving

LINES = b"".join(b'{"text": "document %d"}\n' % number for number in range(200))
TOKENS = np.random.default_rng(0).integers(0, 1000, 5000)


def _archive(write: Callable[[io.BytesIO], object]) -> bytes:
    found = io.BytesIO()
    write(found)
    return found.getvalue()


def _tar(found: io.BytesIO, mode: str = "w") -> None:
    with tarfile.open(fileobj=found, mode=mode) as archive:  # type: ignore[call-overload]
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(LINES)
        archive.addfile(member, io.BytesIO(LINES))


def _zip(found: io.BytesIO) -> None:
    with zipfile.ZipFile(found, "w") as archive:
        archive.writestr("a.jsonl", LINES)


def _arrow(new: Callable[..., pa.RecordBatchStreamWriter]) -> Callable[[io.BytesIO], None]:
    def write(found: io.BytesIO) -> None:
        table = pa.table({"text": ["document"] * 200})
        with new(found, table.schema) as writer:
            writer.write_table(table)

    return write


def _safetensors(found: io.BytesIO) -> None:
    found.write(save({"weight": torch.zeros(300)}))


def _llm_c(found: io.BytesIO, magic: int = 20240520, version: int = 1) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(TOKENS)
    found.write(header.tobytes() + TOKENS.astype("<u2").tobytes())


KINDS = {
    "compressed with gzip: decompress it with `gunzip": gzip.compress(LINES),
    "compressed with Zstandard: decompress": pa.compress(LINES, "zstd", asbytes=True),
    "compressed with LZ4": pa.compress(LINES, "lz4", asbytes=True),
    "compressed with bzip2": bz2.compress(LINES),
    "compressed with xz": lzma.compress(LINES),
    "a zip archive: unpack it with `unzip": _archive(_zip),
    "a tar archive: unpack it with `tar -xf": _archive(_tar),
    "compressed with gzip: ": _archive(lambda found: _tar(found, "w:gz")),
    "a Parquet file": _archive(lambda f: pq.write_table(pa.table({"text": ["a"] * 200}), f)),
    "an Arrow file: data.source arrow": _archive(_arrow(pa.ipc.new_file)),
    "an Arrow file: ": _archive(_arrow(pa.ipc.new_stream)),  # also of Dataset.save_to_disk
    "a NumPy array: data.source tokens": _archive(lambda found: np.save(found, TOKENS)),
    "an archive of NumPy arrays": _archive(lambda found: np.savez(found, train=TOKENS)),
    "a file of torch.save": _archive(lambda found: torch.save({"a": torch.zeros(300)}, found)),
    "a SafeTensors file": _archive(_safetensors),
    "a pickle": pickle.dumps(["document"] * 200),
    "a token file of llm.c, which has a header: data.source": _archive(_llm_c),
    "a token file of llm.c, ": _archive(lambda found: _llm_c(found, 20240801, 7)),
}


@pytest.mark.parametrize("what", KINDS)
def test_file_of_another_format_is_refused_by_every_reader(tmp_path: Path, what: str) -> None:
    for name in ("a.txt", "a.jsonl", "a.u16", "a.csv"):
        (tmp_path / name).write_bytes(KINDS[what])
    TokenMeta(1 << 16, "bytes").write(tmp_path)
    text, lines, tokens, table = (str(tmp_path / f"a.{s}") for s in ("txt", "jsonl", "u16", "csv"))
    with pytest.raises(UserError, match=f"data.train: {text} is {what}"):
        read_text(DataConfig(train=[text]), Tokenizer(None))
    with pytest.raises(UserError, match=f"--input: {text} is {what}"):
        tokenize(Source([text]), tmp_path / "out", Alone())
    with pytest.raises(UserError, match=f"{lines} is {what}"):
        read_text(DataConfig("jsonl", [lines]), Tokenizer(None))
    with pytest.raises(UserError, match=f"{lines} is {what}"):
        _ = JsonLines([lines], str(tmp_path))[0]
    with pytest.raises(UserError, match=f"data.train: {tokens} is {what}"):
        read_token_files("data.train", [tokens])
    with pytest.raises(UserError, match=f"data.train: {table} is {what}"):
        open_table("data.train", [Path(table)], [])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        # Megatron's *.bin and datatrove's *.ds are tokens without a header.
        (TOKENS.astype("<u2").tobytes(), "not text, because it has NUL bytes: .*data.source token"),
        (b"text with too many \0\n" * 9, "not text, because it has NUL bytes"),
        (b"\x01\0" + b"text" * 99, "not text, because it has NUL bytes"),
        ("Größe\n".encode("utf-16-le") * 100, "not text, because it has NUL bytes"),
        ("Größe\n".encode("utf-16") * 100, "UTF-16 text: convert it with `iconv -f UTF-16"),
    ],
)
def test_binary_files_and_utf_16_are_refused_as_text(
    tmp_path: Path, content: bytes, what: str
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b").write_bytes(content)
    with pytest.raises(UserError, match=f"data.train: {tmp_path}/b is {what}"):
        read_text(DataConfig(train=[str(tmp_path)]), Tokenizer(None))


def test_text_in_any_language_and_encoding_is_accepted(tmp_path: Path) -> None:
    texts = [
        "Grüße, 世界, \N{THUMBS UP SIGN}".encode(),
        "Grüße".encode("latin-1"),
        b"\xef\xbb\xbfa",
    ]
    texts += [b"PAR1 is a name\n", b"printable text, and a \0\n" * 10 + b"\n" * 900]
    texts += ["BZh, PK and PAR 1".encode("cp1252"), b"\f\x1b[1mbold\x1b[0m", b"x" * 9000 + b"\0"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    assert len(expand("k", [str(tmp_path)])) == len(texts)
    check_text("k", expand("k", [str(tmp_path)]))


def test_text_of_a_server_without_byte_ranges_is_read() -> None:
    with serving() as server:
        server.ranges = False
        server.files["/a.txt"] = server.files["/b.txt"] = b"text " * 9000
        urls = [server.url("/a.txt"), server.url("/b.txt")]
        train, _ = read_text(DataConfig(train=urls), Tokenizer(None))
        assert train.tobytes() == server.files["/a.txt"]
        server.files["/b.txt"] = gzip.compress(LINES)
        with pytest.raises(UserError, match=r"b\.txt is compressed with gzip: .*`gunzip b\.txt`"):
            read_text(DataConfig(train=urls), Tokenizer(None))


def test_quoted_command_of_a_message_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "two words.txt.gz"
    file.write_bytes(gzip.compress(b"text"))
    with pytest.raises(UserError, match=f"`gunzip '{file}'`$"):
        read_text(DataConfig(train=[str(file)]), Tokenizer(None))


# --- what a directory holds besides ---------------------------------------------


def _jsonl(directory: Path, rest: dict[str, bytes]) -> str:
    directory.mkdir()
    for name, content in {"a.jsonl": LINES, **rest}.items():
        (directory / name).write_bytes(content)
    return str(directory)


@pytest.mark.parametrize("url", [False, True])
@pytest.mark.parametrize("name", ["b.jsonl.lz4"])
def test_compressed_file_next_to_plain_ones_is_refused(
    tmp_path: Path, name: str, url: bool
) -> None:
    content = pa.compress(LINES, "lz4", asbytes=True)
    pattern = _jsonl(tmp_path / "data", {name: content})
    if url:
        pattern = f"memory://{name}"
        for path in (tmp_path / "data").iterdir():
            fsspec.filesystem("memory").pipe_file(f"/{name}/{path.name}", path.read_bytes())
    for patterns in ([pattern], [f"{pattern}/*"]):
        with pytest.raises(UserError, match=f"data.train: .*{name} would be skipped: it is compr"):
            find_files("data.train", patterns, JSON_LINES.suffixes, JSON_LINES.name)
    assert len(find_files("data.train", [f"{pattern}/*.jsonl"], JSON_LINES.suffixes)) == 1


def test_skipped_data_is_named_once_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rest = {"b.json": LINES, "c.arrow": KINDS["an Arrow file: "], "README.md": b"read me"}
    pattern = _jsonl(tmp_path / "data", rest)
    for _ in range(2):
        assert len(expand("data.train", [pattern], JSON_LINES.suffixes, JSON_LINES.name)) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        f"data.train: {pattern}: skipped" in record.message and "b.json, c.arrow" in record.message
    )


def test_small_or_decompressed_companions_are_not_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pattern = _jsonl(tmp_path / "data", {"README.md": b"read me"})
    assert expand("data.train", [pattern], JSON_LINES.suffixes)
    (tmp_path / "data/a.jsonl.gz").write_bytes(gzip.compress(LINES))
    assert expand("data.train", [pattern], JSON_LINES.suffixes)
    TOKENS.astype("<u2").tofile(tmp_path / "data/train.u16")
    TokenMeta(1000, "gpt2", token_bytes=(1,) * 1000).write(tmp_path / "data")
    expand("data.train", [f"{pattern}/t*"], (".u16", ".u32"))
    assert not [record for record in caplog.records if "README" in record.message]
    assert not [record for record in caplog.records if "tokens.json" in record.message]


def _saved_to_disk(directory: Path) -> None:
    """The files of `datasets.Dataset.save_to_disk`."""
    directory.mkdir()
    (directory / "data-00000-of-00001.arrow").write_bytes(KINDS["an Arrow file: "])
    (directory / "dataset_info.json").write_text(json.dumps({"features": {}}))
    files = [{"filename": "data-00000-of-00001.arrow"}]
    (directory / "state.json").write_text(json.dumps({"_data_files": files}))


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_directory_of_save_to_disk_is_named_with_its_source(tmp_path: Path, source: str) -> None:
    _saved_to_disk(tmp_path / "saved")
    config = DataConfig(source, [str(tmp_path / "saved")])  # type: ignore[arg-type]
    message = "an Arrow file: data.source arrow reads|set data.source arrow"
    with pytest.raises(UserError, match=message) as raised:
        read_packed(config, Tokenizer(None))
    assert "data-00000-of-00001.arrow" in str(raised.value)


def test_directory_without_usable_files_names_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "lz4").mkdir()
    for name, content in (("a", LINES), ("b", LINES * 2)):
        packed = pa.compress(content, "lz4", asbytes=True)
        (tmp_path / f"lz4/{name}.jsonl.lz4").write_bytes(packed)
    pattern = str(tmp_path / "lz4")
    with pytest.raises(UserError, match=r"lz4 has no file of JSON lines \(.*, only b.jsonl.lz4, a"):
        JsonLines([pattern])
    with pytest.raises(UserError, match=r"b.jsonl.lz4 is compressed with LZ4: decompress"):
        JsonLines([pattern])
    with pytest.raises(
        UserError, match=r"a.jsonl.lz4 is not a file of .*, but compressed with LZ4"
    ):
        JsonLines([f"{pattern}/a*"])
    (tmp_path / "hidden/.ipynb_checkpoints").mkdir(parents=True)
    (tmp_path / "hidden/.ipynb_checkpoints/a.jsonl").write_bytes(LINES)
    with pytest.raises(UserError, match="hidden has no files; hidden ones are skipped"):
        JsonLines([str(tmp_path / "hidden")])


def test_hidden_files_behind_urls_are_skipped() -> None:
    system = fsspec.filesystem("memory")
    for name in ("a.jsonl", "._a.jsonl", ".ipynb_checkpoints/a.jsonl", "more/b.jsonl"):
        system.pipe_file(f"/hidden/{name}", LINES)
    for pattern in ("memory://hidden", "memory://hidden/**"):
        found = find_files("k", [pattern], JSON_LINES.suffixes)
        assert [path.name for path in found] == ["a.jsonl", "b.jsonl"]


def test_tar_shards_and_parquet_name_compressed_files(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(KINDS["compressed with gzip: "])
    with pytest.raises(UserError, match=r"a\.tar is compressed with gzip: decompress"):
        TarShards([str(tmp_path / "a.tar")])
    (tmp_path / "a.parquet").write_bytes(gzip.compress(LINES))
    with pytest.raises(UserError, match=r"a\.parquet is compressed with gzip: decompress"):
        ParquetRows([str(tmp_path / "a.parquet")])


# --- token files ------------------------------------------------------------------


def _tokens(directory: Path, dtype: str, suffix: str, vocab_size: int, tail: int = 0) -> str:
    directory.mkdir(exist_ok=True)
    tokens = np.append(TOKENS, [tail] * 9)
    tokens.astype(dtype).tofile(directory / f"a{suffix}")
    TokenMeta(vocab_size, "gpt2").write(directory)
    return str(directory / f"a{suffix}")


@pytest.mark.parametrize(
    ("written", "suffix", "message"),
    [
        ("<u4", ".u16", "If the tokens have 32 bits, name the file *.u32"),
        ("<i8", ".u16", "If the tokens have 32 bits"),
        ("<i8", ".u32", "If the tokens have 64 bits, store them with 32 bits"),
    ],
)
def test_tokens_that_look_wider_have_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: str, suffix: str, message: str
) -> None:
    file = Path(_tokens(tmp_path, written, suffix, 1000, tail=1))
    assert read_token_files("data.train", [str(file)])
    assert f"data.train: {file}: every second number" in caplog.text and message in caplog.text
    caplog.clear()
    with open(file, "ab") as opened:
        opened.write(bytes(DTYPES[suffix].itemsize))  # a half of a wider token
    assert read_token_files("data.train", [str(file)]) and not caplog.records


@pytest.mark.parametrize(("written", "suffix"), [("<u2", ".u32"), ("u1", ".u16")])
def test_tokens_that_are_narrower_are_refused(tmp_path: Path, written: str, suffix: str) -> None:
    file = _tokens(tmp_path, written, suffix, 1000, tail=1)
    message = rf"data.train: {file}: token \d+ is outside the vocabulary of 1000 tokens: check"
    with pytest.raises(UserError, match=message):
        read_token_files("data.train", [file])


@pytest.mark.parametrize("letters", [4, 5, 70000])
def test_small_and_large_vocabularies_are_accepted(tmp_path: Path, letters: int) -> None:
    tokens = np.random.default_rng(0).integers(0, min(letters, 4), 3000)
    tokens[0] = letters - 1
    suffix, dtype = (".u32", "<u4") if letters > 1 << 16 else (".u16", "<u2")
    tokens.astype(dtype).tofile(tmp_path / f"a{suffix}")
    TokenMeta(letters, "nucleotides").write(tmp_path)
    arrays, _ = read_token_files("data.train", [str(tmp_path)])
    assert np.array_equal(np.asarray(arrays[0]), tokens)


def test_text_with_the_suffix_of_tokens_is_refused(tmp_path: Path) -> None:
    file = Path(_tokens(tmp_path, "<u2", ".u16", 1 << 16))
    file.write_bytes("Grüße aus dem Text\n".encode() * 500)
    with pytest.raises(UserError, match=f"{file} is text: tokenize it with `hvdtrain data token"):
        read_token_files("data.train", [str(file)])


@pytest.mark.parametrize("url", [False, True])
def test_late_token_beyond_the_vocabulary_is_named_with_its_file(tmp_path: Path, url: bool) -> None:
    file = good = _tokens(tmp_path, "<u2", ".u16", 1000, tail=999)
    file = _tokens(tmp_path / "wrong", "<u2", ".u16", 1000, tail=50256)
    if url:
        system = fsspec.filesystem("memory")
        for name in ("a.u16", "tokens.json"):
            system.pipe_file(f"/late/{name}", (tmp_path / "wrong" / name).read_bytes())
        file = "memory:///late/a.u16"
    data = DataConfig("tokens", [good], [file])
    train, validation = read_packed(data, None).windows(8, "model.context", 1000)
    assert len(train[len(train) - 1]) == len(validation[0]) == 9
    with pytest.raises(UserError, match=f"^{file}: token 50256 is outside the vocabulary of 1000"):
        _ = validation[len(validation) - 1]


def test_first_tokens_beyond_the_vocabulary_are_refused_at_the_start(tmp_path: Path) -> None:
    file = _tokens(tmp_path, "<u2", ".u16", 900)
    with pytest.raises(UserError, match=f"data.train: {file}: token 9.. is outside the vocabulary"):
        read_token_files("data.train", [file])


# --- records ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'{"text": "cut \ud83d"}', r"line 2 has half of a character, \\ud83d"),
        ("[" * 99999, r"line 2 is not a JSON object \(it is nested too deeply"),
        ('{"text": ' + "[" * 9999 + "]" * 9999 + "}", "line 2 .*nested too deeply"),
        ('{"text": null}', "line 2 has null for 'text': remove"),
        ('{"body": "a", "id": 1}', "line 2 has no 'text', only body, id: set data.text_key"),
        ('{"text": {"body": "a"}}', "line 2 has an object for 'text', with body: .* text.body"),
        ('{"text": ["a"]}', "line 2 has a list instead of text for 'text'"),
    ],
)
def test_unusable_json_line_is_named_with_file_and_number(
    tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(UserError, match=f"{tmp_path}/a.jsonl: {message}") as raised:
        read_text(DataConfig("jsonl", [str(tmp_path)]), Tokenizer(None))
    assert "\n" not in str(raised.value)


def _rows(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=50)
    return path


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_text_key_names_a_field_of_an_object(tmp_path: Path, source: str) -> None:
    rows = [{"doc": {"text": f"document {n}", "n": n}} for n in range(60)]
    if source == "parquet":
        _rows(tmp_path / "a.parquet", doc=[row["doc"] for row in rows])
    else:
        (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    train, validation = read_text(
        DataConfig(source, [str(tmp_path)], text_key="doc.text"),  # type: ignore[arg-type]
        Tokenizer(None),
    )
    expected = b"".join(f"document {n}\0".encode() for n in range(60))
    assert np.concatenate([train, validation]).tobytes() == expected
    with pytest.raises(UserError, match=r"(no column|no) 'doc\.body'"):
        read_text(
            DataConfig(source, [str(tmp_path)], text_key="doc.body"),  # type: ignore[arg-type]
            Tokenizer(None),
        )


def test_parquet_rows_of_a_struct_field_are_read(tmp_path: Path) -> None:
    _rows(tmp_path / "a.parquet", doc=[{"text": "a", "n": 1}], **{"flat.name": ["b"]})
    assert ParquetRows([str(tmp_path)], ["doc.text"])[0] == {"doc": {"text": "a"}}
    assert ParquetRows([str(tmp_path)], ["flat.name"])[0] == {"flat.name": "b"}


def _not_utf_8() -> pa.Array:
    texts = pa.array([b"ok", b"\xff\xfe"], pa.binary())
    return pa.Array.from_buffers(pa.string(), len(texts), texts.buffers())


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a"] * 70 + [None], "row 71 has null for 'text': remove records without text"),
        ([b"a"] * 70, "row 1 has binary data for 'text': convert the column to strings"),
        ([{"body": "a"}], "row 1 has an object for 'text', with body: set .* such as to text.body"),
        ([["a"]], "row 1 has a list instead of text for 'text'"),
        (_not_utf_8(), "has text that is not UTF-8"),
    ],
)
def test_unusable_parquet_column_is_named_with_its_row(
    tmp_path: Path, column: object, message: str
) -> None:
    _rows(tmp_path / "a.parquet", text=column)
    with pytest.raises(UserError, match=f"a.parquet:? {message}"):
        read_text(DataConfig("parquet", [str(tmp_path)]), Tokenizer(None))


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_file_without_records_is_no_validation_data(tmp_path: Path, source: str) -> None:
    texts = [f"document {n}" for n in range(100)]
    for name in "abcdef":  # several names: one of them would be chosen for validation
        if source == "parquet":
            _rows(tmp_path / f"{name}.parquet", text=pa.array([], pa.string()))
        else:
            (tmp_path / f"{name}.jsonl").write_text("\n \n")
    config = DataConfig(source, [str(tmp_path)])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no records, only empty files"):
        read_text(config, Tokenizer(None))
    if source == "parquet":
        _rows(tmp_path / "full.parquet", text=texts)
    else:
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "full.jsonl").write_text(rows)
    train, validation = read_text(config, Tokenizer(None))
    assert len(validation) and np.concatenate([train, validation]).tobytes() == b"".join(
        f"{text}\0".encode() for text in texts
    )
