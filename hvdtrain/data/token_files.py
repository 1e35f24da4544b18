"""Files of tokens, and tokens.json, which describes those of a directory."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.arrow import ARROW, of_datasets, token_lists
from hvdtrain.data.file_kinds import HEAD_BYTES
from hvdtrain.data.files import find_files
from hvdtrain.data.remote import (
    REQUESTS_AT_ONCE,
    ByteRanges,
    DataFile,
    RemoteFile,
    beginning,
    read_url,
)
from hvdtrain.data.token_formats import (
    DTYPES,
    SUFFIXES,
    DocumentStarts,
    TokenLayout,
    layout_of,
)
from hvdtrain.errors import UserError
from hvdtrain.log import logger

_META = "tokens.json"
_NUMBERS = ("uint8", "uint16", "uint32", "int32", "int64")
_EXAMPLE = '{"vocab_size": 50257, "tokenizer": "gpt2"}'
# Tokens that show whether they are wider than their suffix says.
_FEWEST = 64


@dataclass(frozen=True)
class TokenMeta:
    """Content of tokens.json, which is stored next to token files.

    Args:
        vocab_size: tokens are in [0, vocab_size)
        tokenizer: file name of the tokenizer, or "bytes"
        separator: the token between two documents; None: no separator
        token_bytes: number of bytes of text per token; None: 1 for "bytes", otherwise unknown
        dtype: of the tokens of files that do not tell it, such as "uint16"
    """

    vocab_size: int
    tokenizer: str
    separator: int | None = None
    token_bytes: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    dtype: str | None = field(default=None, repr=False, compare=False)

    @property
    def vocabulary(self) -> tuple[str, int]:
        """Name of the tokenizer, and number of its tokens."""
        return self.tokenizer, self.vocab_size

    @property
    def number_type(self) -> np.dtype[Any] | None:
        """`dtype`, little-endian."""
        return None if self.dtype is None else np.dtype(self.dtype).newbyteorder("<")

    def bytes_of_tokens(self) -> NDArray[np.int64] | None:
        """Number of bytes of text per token (vocab_size); None if unknown."""
        if self.token_bytes is None and self.tokenizer != "bytes":
            return None
        sizes = np.ones(self.vocab_size, dtype=np.int64)
        if self.token_bytes is not None:
            sizes[:] = self.token_bytes
        if self.separator is not None:
            sizes[self.separator] = 0
        return sizes

    def write(self, directory: Path) -> None:
        facts = {name: value for name, value in asdict(self).items() if name != "dtype" or value}
        (directory / _META).write_text(json.dumps(facts) + "\n")

    @classmethod
    def read(cls, file: DataFile, described: TokenMeta | None = None) -> TokenMeta:
        """Read the metadata next to a token file.

        Args:
            described: the metadata if there is no such file; None: it is required.

        Raises:
            UserError: it cannot be read, or there is none.
        """
        remote = isinstance(file, RemoteFile)
        path = file.sibling(_META) if isinstance(file, RemoteFile) else file.with_name(_META)
        try:
            facts = json.loads(read_url(str(path)) if remote else Path(path).read_text())
            sizes = facts.pop("token_bytes", None)
            found = cls(**facts, token_bytes=None if sizes is None else tuple(sizes))
            if found.dtype is not None and found.dtype not in _NUMBERS:
                raise ValueError(f"dtype must be one of {', '.join(_NUMBERS)}")
        except FileNotFoundError:
            if described is not None:
                return described
            raise UserError(
                f"{file}: there is no {_META} next to it. Name the tokenizer of these tokens with "
                f"data.tokenizer, or write the file, such as {_EXAMPLE}"
            ) from None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: cannot be read ({error}); such as {_EXAMPLE}") from None
        return found


class TokenParts:
    """Several arrays of tokens as one; a slice is copied when it becomes a numpy array.

    Args:
        parts: 1-D, of one dtype.
        starts: number of the first token of each, and of all tokens.
        span: numbers of the tokens of this slice.
    """

    def __init__(self, parts: Sequence[NDArray[Any]], starts: Sequence[int], span: range) -> None:
        self._parts, self._starts, self._span = parts, starts, span
        self.dtype: np.dtype[Any] = parts[0].dtype

    @classmethod
    def of(cls, parts: Sequence[NDArray[Any]]) -> TokenParts:
        starts = [0, *accumulate(map(len, parts))]
        return cls(parts, starts, range(starts[-1]))

    def __len__(self) -> int:
        return len(self._span)

    def __getitem__(self, which: slice) -> TokenParts:
        return TokenParts(self._parts, self._starts, self._span[which])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        start, stop = self._span.start, self._span.stop
        number, found = bisect_right(self._starts, start) - 1, []
        while number < len(self._parts) and (before := self._starts[number]) < stop:
            found.append(self._parts[number][max(0, start - before) : stop - before])
            number += 1
        whole = np.concatenate(found) if found else np.empty(0, self.dtype)
        return whole.astype(dtype or self.dtype, copy=False)


class FileTokens:
    """Tokens of a token file, or a part of them. They are read when it becomes a numpy array.

    Local files are memory-mapped.

    Args:
        layout: of the file.
        span: numbers of the tokens.
        source: the mapped tokens of a local file, or what reads a remote one.
    """

    def __init__(
        self,
        file: DataFile,
        layout: TokenLayout,
        span: range,
        source: NDArray[Any] | TokenParts | ByteRanges,
    ) -> None:
        self.file = file
        self.dtype = layout.dtype.newbyteorder("=")
        self._layout, self._span, self._source = layout, span, source

    def __len__(self) -> int:
        return len(self._span)

    def __getitem__(self, which: slice) -> FileTokens:
        return FileTokens(self.file, self._layout, self._span[which], self._source)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        start, stop = self._span.start, self._span.stop
        if isinstance(self._source, ByteRanges):
            size, first = self._layout.dtype.itemsize, self._layout.start
            assert isinstance(self.file, RemoteFile)
            content = self._source.read(self.file, first + start * size, first + stop * size)
            found = np.frombuffer(content, self._layout.dtype)
        else:
            found = np.asarray(self._source[start:stop])
        return found.astype(dtype or self.dtype, copy=bool(copy))

    @property
    def mapped(self) -> NDArray[Any] | TokenParts | FileTokens:
        """The tokens as an array, from which reading is fastest, if the file is mapped."""
        if isinstance(self._source, ByteRanges):
            return self
        return self._source[self._span.start : self._span.stop]

    @property
    def has_documents(self) -> bool:
        """Whether the borders of documents are known."""
        return self._layout.documents is not None

    def documents(self) -> NDArray[np.int64]:
        """int64, one per token: the number of its document, from 0; `has_documents` is True."""
        assert self._layout.documents is not None
        return self._layout.documents.numbered(self._span.start, self._span.stop)


def read_token_files(
    key: str, patterns: Sequence[str], described: TokenMeta | None = None
) -> tuple[list[FileTokens], TokenMeta]:
    """Memory-map local token files; open remote ones.

    Args:
        key: the configuration key the patterns come from, for messages.
        patterns: files, directories, globs or URLs.
        described: the metadata of tokens without a tokens.json next to them; None: they need one.

    Raises:
        UserError: no file, an empty file, one whose layout is unknown or not that of its header or
            index, files of different vocabularies, or content that is not tokens of the
            vocabulary, as far as the start of a file shows it.
    """
    files = of_datasets(key, find_files(key, patterns, suffixes=(*SUFFIXES, *ARROW.suffixes)))
    first = {os.path.dirname(str(file)): file for file in reversed(files)}
    metas = {directory: TokenMeta.read(file, described) for directory, file in first.items()}
    ranges = ByteRanges()

    def opened(file: DataFile) -> FileTokens:
        directory = os.path.dirname(str(file))
        if file.suffix in ARROW.suffixes:
            return _of_arrow(key, file, metas[directory].vocab_size)
        if isinstance(file, RemoteFile) and file.suffix in DTYPES and file != first[directory]:
            # Each would cost a request: one per directory is examined.
            return _open(key, file, TokenLayout(DTYPES[file.suffix]), ranges)
        head, meta = beginning(file, HEAD_BYTES), metas[directory]
        layout = layout_of(key, file, head, meta.number_type)
        check = partial(_check_start, key, file, head, layout, meta.vocab_size)
        if layout.tokens is None:  # an odd size may be that of wider tokens
            check()
            return _open(key, file, layout, ranges)
        found = _open(key, file, layout, ranges)
        check()  # later: tokens of another size may be those of another index
        return found

    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        local = [opened(file) for file in files if isinstance(file, Path)]
        found = [*local, *pool.map(opened, (f for f in files if isinstance(f, RemoteFile)))]
    if len({*metas.values()}) > 1:
        raise UserError(
            f"{key}: these token files were made with different tokenizers: {set(metas.values())}"
        )
    return found, next(iter(metas.values()))


def _open(key: str, file: DataFile, layout: TokenLayout, ranges: ByteRanges) -> FileTokens:
    size, dtype = file.stat().st_size - layout.start, layout.dtype
    count, rest = divmod(size, dtype.itemsize)
    if rest or (layout.tokens is not None and layout.tokens != count):
        says = "" if layout.tokens is None else f", and should have {layout.tokens} tokens"
        raise UserError(
            f"{key}: {file} has {size} bytes of tokens, {dtype.itemsize} bytes each{says}: it is "
            "truncated, or its header or index is of another file"
        )
    if isinstance(file, RemoteFile):
        return FileTokens(file, layout, range(count), ranges)
    try:
        # Access to an array is several times as fast as to a memmap.
        mapped = np.asarray(np.memmap(file, dtype, "r", layout.start, (count,)))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {file}: {error}") from None
    return FileTokens(file, layout, range(count), mapped)


def _of_arrow(key: str, file: DataFile, vocab_size: int) -> FileTokens:
    """The tokens in the rows of an Arrow file, each row a document."""
    if isinstance(file, RemoteFile):
        raise UserError(f"{key}: {file}: tokens of Arrow files are read from local files")
    rows = [*token_lists(key, file)]
    if not sum(len(tokens) for tokens, _ in rows):
        raise UserError(f"{key}: {file} has no tokens")
    tokens = TokenParts.of([tokens for tokens, _ in rows])
    ends = np.cumsum(np.concatenate([lengths for _, lengths in rows]), dtype=np.int64)
    layout = TokenLayout(tokens.dtype, 0, len(tokens), DocumentStarts(ends, len(tokens)))
    head = np.asarray(tokens[: HEAD_BYTES // tokens.dtype.itemsize]).tobytes()
    _check_start(key, file, head, layout, vocab_size)
    return FileTokens(file, layout, range(len(tokens)), tokens)


def _check_start(
    key: str, file: DataFile, head: bytes, layout: TokenLayout, vocab_size: int
) -> None:
    """Check that the first tokens of a file are in the vocabulary; raise UserError if not."""
    dtype = layout.dtype
    content = head[layout.start :]
    tokens = np.frombuffer(content[: len(content) - len(content) % dtype.itemsize], dtype)
    bits = 8 * dtype.itemsize
    upper = (vocab_size - 1) >> bits  # the largest upper half of a token of twice as many bits
    raw = layout.tokens is None and layout.documents is None
    wider = file.stat().st_size % (2 * dtype.itemsize) == 0 and len(tokens) >= _FEWEST
    if raw and wider and tokens[1::2].max() <= upper < tokens[::2].max():
        hint = "store them with 32 bits"
        if bits == 16:
            hint = (
                "name the file *.u32" if file.suffix in DTYPES else f"set dtype uint32 in {_META}"
            )
        logger.warning(  # other tokens may have this form, too
            "%s: %s: every second number of %d bits is at most %d. If the tokens have %d bits, %s",
            key,
            file,
            bits,
            upper,
            2 * bits,
            hint,
        )
    if len(tokens) and (tokens.max() >= vocab_size or tokens.min() < 0):
        wrong = tokens.max() if tokens.max() >= vocab_size else tokens.min()
        raise UserError(f"{key}: {file}: {outside_vocabulary(int(wrong), vocab_size)}")


def outside_vocabulary(token: int, vocab_size: int) -> str:
    """What is wrong with a token of a file, for messages."""
    return (
        f"token {token} is outside the vocabulary of {vocab_size} tokens: check the tokens, their "
        f"size (the suffix .u16 or .u32, or dtype in {_META}), and the tokenizer or {_META}"
    )
