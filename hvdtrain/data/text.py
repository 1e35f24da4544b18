"""Text as tokens: its bytes, or the tokens of a `tokenizers` file.

A document is a text file, or a record of JSON lines, Parquet or Arrow. If a file holds several
documents, an end token follows each (Tokenizer.end). Each rank holds all tokens in memory. Text of
many gigabytes is better tokenized once (`hvdtrain data tokenize`) and memory-mapped
(`data.source tokens`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.arrow import ARROW, batches, of_datasets
from hvdtrain.data.compressed import open_decompressed
from hvdtrain.data.file_kinds import ARROW_FILE, HEAD_BYTES, kind_of
from hvdtrain.data.files import find_files, standard_library
from hvdtrain.data.index import Format
from hvdtrain.data.parquet import PARQUET, read_group, records_of, row_groups
from hvdtrain.data.records import JSON_LINES, parse_line, unicode_problem
from hvdtrain.data.remote import ByteRanges, DataFile, beginning
from hvdtrain.data.token_files import TokenMeta
from hvdtrain.data.tokens import TokenArray, with_separator
from hvdtrain.errors import UserError
from hvdtrain.untrusted import parse_json

BYTES_VOCABULARY = 256
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's notation
_LONGEST_LINE = 1 << 24
# Larger files are not examined for whether they hold any record.
_LARGEST_EMPTY_FILE = 1 << 14
# Common names of the end-of-document token.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
# data.source -> format of its files; with other sources, each file holds one document.
RECORDS: dict[str, Format] = {"jsonl": JSON_LINES, "parquet": PARQUET, "arrow": ARROW}


class Tokenizer:
    """Bytes, or a tokenizer.json of the `tokenizers` library.

    Args:
        path: the file; None = bytes, vocabulary 256.

    Attributes:
        vocab_size: number of tokens.
        highest: highest token number; a file may skip numbers.

    Raises:
        UserError: the library is not installed, or the file cannot be read.
    """

    def __init__(self, path: str | None) -> None:
        self._tokenizer = None
        self._path = path
        self.vocab_size = BYTES_VOCABULARY
        self.highest = BYTES_VOCABULARY - 1
        self.name = "bytes"
        if path is None:
            return
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise UserError(
                "data.tokenizer needs the tokenizers library: pip install 'hvdtrain[tokenizers]'"
            ) from None
        try:
            self._tokenizer = Library.from_file(path)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"data.tokenizer: {path}: {error}") from None
        # Some files request truncation or padding to the length of a particular model.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.highest = max(self._tokenizer.get_vocab().values(), default=0)
        self.name = Path(path).name

    @property
    def end(self) -> int | None:
        """The token that ends a document; None if there is none. For bytes it is 0, not in text."""
        if self._tokenizer is None:
            return 0
        assert self._path is not None
        # Two names come first, because the eos_token of a model for chats may only end a turn.
        names = (*_ENDS[:2], *_eos_token(Path(self._path)), *_ENDS[2:])
        found = (self._tokenizer.token_to_id(name) for name in names)
        return next((number for number in found if number is not None), None)

    @property
    def meta(self) -> TokenMeta:
        """Metadata of the tokens; documents are not separated."""
        sizes = None if self._path is None else bytes_of_tokens(self._path, self.vocab_size)
        return TokenMeta(self.vocab_size, self.name, token_bytes=sizes)

    def separator(self, source: str, separate: bool) -> int | None:
        """The token to insert after each document; None: documents are concatenated directly.

        Args:
            source: as `data.source`; records are separated if the tokenizer has an end token.
            separate: whether documents must be separated.

        Raises:
            UserError: documents must be separated, but the tokenizer has no end token.
        """
        if separate and self.end is None:
            raise UserError(
                f"{self.name} has no end-of-document token, which separates documents: one of "
                f"{', '.join(_ENDS)}, or eos_token in tokenizer_config.json in the same directory"
            )
        return self.end if separate or source in RECORDS else None

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every token."""
        return np.min_scalar_type(self.highest)

    def encode(self, text: bytes) -> TokenArray:
        """Tokens of a whole file; for text tokenizers, invalid UTF-8 is replaced."""
        if self._tokenizer is None:
            return np.frombuffer(text, dtype=np.uint8)
        ids = self._tokenizer.encode(text.decode("utf-8", errors="replace")).ids
        return np.asarray(ids, dtype=self.dtype)

    def encode_all(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """Tokens of several files or records.

        The library computes with threads if there are several. It must not in a process that is
        forked later: after a fork, it prints a warning and does without.
        """
        if self._tokenizer is None or len(texts) == 1:
            return [*map(self.encode, texts)]
        decoded = [text.decode("utf-8", errors="replace") for text in texts]
        found = self._tokenizer.encode_batch_fast(decoded)  # without positions in the text
        return [np.asarray(one.ids, dtype=self.dtype) for one in found]

    def ids(self, text: str, special: bool = True, longest: int | None = None) -> list[int]:
        """Tokens of one text, with a tokenizer.json.

        Args:
            special: add the file's special tokens around a text, such as [CLS] and [SEP].
            longest: maximum number of tokens, including special ones; longer text is truncated at
                its end, before the special tokens.
        """
        assert self._tokenizer is not None
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if longest is not None:
            around = self._tokenizer.num_special_tokens_to_add(False) if special else 0
            encoding.truncate(max(longest - around, 0))
        if special:
            encoding = self._tokenizer.post_process(encoding)
        found: list[int] = encoding.ids
        return found

    def number_of(self, token: str) -> int | None:
        """Number of a token such as "</s>"; None if it is not in the vocabulary."""
        assert self._tokenizer is not None
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return bytes(t for t in tokens if t < BYTES_VOCABULARY).decode(
                "utf-8", errors="replace"
            )
        return self._tokenizer.decode(list(tokens))


def _eos_token(tokenizer: Path) -> Iterator[str]:
    """Name of the end token in the tokenizer_config.json of a tokenizer.json, if there is one.

    Raises:
        UserError: the file cannot be read.
    """
    file = tokenizer.with_name("tokenizer_config.json")
    if not file.is_file():
        return
    try:
        facts = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: {error}") from None
    token = facts.get("eos_token") if isinstance(facts, dict) else None
    if isinstance(token, dict):  # with options for splitting
        token = token.get("content")
    if isinstance(token, str):
        yield token


def read(path: DataFile) -> bytes:
    """Return a file's bytes; raise UserError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def documents(path: DataFile, source: str, text_key: str) -> Iterator[bytes]:
    """The texts of a file.

    Args:
        source: as `data.source`.
        text_key: key of a record's text.

    Raises:
        UserError: the file cannot be read, or a record has no text.
    """
    if source not in RECORDS:
        yield read(path)
    else:
        for where, record in records(path, source, text_key):
            try:
                text = text_of(record, text_key)
                content = text.encode()
            except ValueError as error:
                reason = unicode_problem(text) if isinstance(error, UnicodeError) else error
                raise UserError(f"{path}: {where} {reason}") from None
            yield content


def text_of(record: dict[str, Any], key: str) -> str:
    """The text of a record; the key doc.body also names the key body in an object doc.

    Raises:
        ValueError: there is no text.
    """
    value: Any = record
    for name in (key,) if key in record else key.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"has no {key!r}, only {', '.join(record)}: set data.text_key")
        value = value[name]
        if value is None:
            raise ValueError(f"has null for {key!r}: remove records without text")
    if isinstance(value, dict):
        raise ValueError(
            f"has an object for {key!r}, with {', '.join(value)}: set data.text_key, such as to "
            f"{key}.{next(iter(value), 'KEY')}"
        )
    if isinstance(value, bytes):
        raise ValueError(f"has binary data for {key!r}: convert the column to strings")
    if not isinstance(value, str):
        raise ValueError(
            f"has a {type(value).__name__} instead of text for {key!r}: set data.text_key"
        )
    return value


def json_lines(path: DataFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """("line 3", its object) of each line with characters, without an index of the file.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object.
    """
    start = 0
    try:
        with open_decompressed(path) as opened:
            for number, line in enumerate(opened, start=1):
                if line.strip():
                    yield f"line {number}", parse_line(line, path, start)
                start += len(line)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def records(
    path: DataFile, source: str, column: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """("line 3" or "row 3", record) of each record of a file.

    Args:
        source: as `data.source`, one of RECORDS.
        column: the only one to read of a table; None = all.

    Raises:
        UserError: the file is broken, or lacks the column.
    """
    if source == "jsonl":
        yield from json_lines(path)
        return
    columns, ranges, number = None if column is None else [column], ByteRanges(), 0
    parts: Iterator[Any] = batches(path, columns, ranges)
    if source == "parquet":
        groups = range(len(row_groups(path)) - 1)
        parts = (read_group(path, group, columns, ranges) for group in groups)
    for part in parts:
        for row in records_of(part, path):
            number += 1
            yield f"row {number}", row


def document_files(
    key: str, patterns: Sequence[str], source: str, keys: tuple[str, str]
) -> list[DataFile]:
    """The files that hold documents; without patterns, the standard library's source files.

    Files of text are not opened; see `check_text`.

    Args:
        key: that names the patterns, for messages.
        source: as `data.source`.
        keys: that set the source and the name of a record's text, for messages.

    Raises:
        UserError: a pattern matches no file, or records would be read as text.
    """
    form = RECORDS.get(source)
    kind = (form.suffixes, form.name) if form else ()
    if not patterns:
        return [*standard_library()]
    files = find_files(key, patterns, *kind)
    if form is None:
        _refuse_records(key, files, *keys)
        return files
    if source == "arrow":
        files = of_datasets(key, files)
    full = [path for path in files if not _is_empty(path, source)]
    if not full:
        raise UserError(f"{key}: {', '.join(map(str, files[:3]))}: no records, only empty files")
    return full


def _is_empty(path: DataFile, source: str) -> bool:
    """Whether a file has no records: only its schema, or only empty lines."""
    if path.stat().st_size > _LARGEST_EMPTY_FILE:
        return False
    if source != "jsonl":
        return next(records(path, source), None) is None
    with open_decompressed(path) as opened:
        return not any(map(bytes.strip, opened))


def _refuse_records(key: str, paths: Sequence[DataFile], source: str, text_key: str) -> None:
    """Refuse to read files as plain text if records make up most of their bytes.

    Args:
        key: that names the files, for the message.
        source, text_key: the keys to set instead.

    Raises:
        UserError: they hold records.
    """
    kinds = {path: kind for path in paths if (kind := _kind_of_records(path))}
    size = sum(path.stat().st_size for path in paths)
    if 2 * sum(path.stat().st_size for path in kinds) <= size:
        return
    path, kind = next(iter(kinds.items()))
    raise UserError(
        f"{key}: {path} is a {RECORDS[kind].name}, but {source} is text, which would train on its "
        f"raw content; set {source} {kind}, and {text_key} to the name of its text"
    )


def _kind_of_records(path: DataFile) -> str | None:
    """Kind of RECORDS in a file, by its name and its beginning; None if there is none."""
    kind = next((k for k, form in RECORDS.items() if path.name.endswith(form.suffixes)), None)
    if kind is None:
        return None
    try:
        if kind != "jsonl":
            head = beginning(path, HEAD_BYTES)
            known = head.startswith(b"PAR1") if kind == "parquet" else kind_of(head) is ARROW_FILE
            return kind if known else None
        with open_decompressed(path) as file:
            return kind if isinstance(parse_json(file.readline(_LONGEST_LINE)), dict) else None
    except (OSError, ValueError, UserError):
        return None  # reading it as text reports the error


def encode_file(
    path: DataFile,
    tokenizer: Tokenizer,
    source: str,
    text_key: str,
    separator: int | None,
    at_once: int = 1,
) -> TokenArray:
    """Tokens of all documents of a file, see `documents`.

    Args:
        separator: token to insert after each document; None: no separator.
        at_once: documents that are tokenized together, see Tokenizer.encode_all.

    Raises:
        UserError: it cannot be read, or a record has no text.
    """
    texts = documents(path, source, text_key)
    parts: list[TokenArray] = []
    while several := [*islice(texts, at_once)]:
        parts += [with_separator(found, separator) for found in tokenizer.encode_all(several)]
    return np.concatenate(parts) if parts else np.empty(0, tokenizer.dtype)


# --- bytes of text per token --------------------------------------------------


def bytes_of_tokens(tokenizer: str, vocab_size: int) -> tuple[int, ...]:
    """Number of bytes of text per token; 0 for special tokens.

    Text that a tokenizer drops, such as spaces, or does not know is not counted.

    Args:
        tokenizer: a tokenizer.json that the `tokenizers` library has accepted.
        vocab_size: number of its tokens.
    """
    facts = json.loads(Path(tokenizer).read_text(encoding="utf-8"))
    model, added = facts["model"], facts.get("added_tokens") or []
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # (text, score) of a Unigram model
        vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
    decoder = json.dumps(facts["decoder"], ensure_ascii=False)
    sizes = [0] * vocab_size
    for text, number in vocabulary.items():
        if text != model.get("unk_token") and number < vocab_size:
            sizes[number] = _size(text, decoder)
    for token in added:  # stored literally
        if token["id"] < vocab_size:
            sizes[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    return tuple(sizes)


def _size(token: str, decoder: str) -> int:
    """Bytes of text that a token stands for, in the notation of a decoder.

    Args:
        decoder: the tokenizer's decoder, as JSON.
    """
    if '"ByteLevel"' in decoder:
        return len(token)  # one letter per byte
    if '"ByteFallback"' in decoder and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return 1
    if '"WordPiece"' in decoder:
        token = token.removeprefix("##")
    return len((token.replace(_SPACE, " ") if _SPACE in decoder else token).encode())
