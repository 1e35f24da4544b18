"""Token sequences: windows over arrays of tokens, in memory or memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.file_kinds import HEAD_BYTES, TEXT, is_text, kind_of, refusal
from hvdtrain.data.files import FileFacts, Fingerprint, find_files, names_below_root
from hvdtrain.data.remote import ByteRanges, DataFile, RemoteFile, beginning, read_url
from hvdtrain.errors import UserError
from hvdtrain.log import logger

TokenArray = NDArray[Any]  # 1-D, any unsigned integer type

# The suffix of a token file determines its dtype.
_META = "tokens.json"
# Tokens that show whether they are wider than their suffix says.
_FEWEST = 64
DTYPES: dict[str, np.dtype[Any]] = {".u16": np.dtype("<u2"), ".u32": np.dtype("<u4")}


@dataclass(frozen=True)
class TokenMeta:
    """Content of tokens.json, which is stored next to token files.

    Args:
        vocab_size: tokens are in [0, vocab_size)
        tokenizer: file name of the tokenizer, or "bytes"
        separator: the token between two documents; None: no separator
        token_bytes: number of bytes of text per token; None: 1 for "bytes", otherwise unknown
    """

    vocab_size: int
    tokenizer: str
    separator: int | None = None
    token_bytes: tuple[int, ...] | None = field(default=None, repr=False, compare=False)

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
        (directory / _META).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, file: DataFile) -> TokenMeta:
        """The metadata next to a token file."""
        remote = isinstance(file, RemoteFile)
        path = file.sibling(_META) if isinstance(file, RemoteFile) else file.with_name(_META)
        try:
            facts = json.loads(read_url(str(path)) if remote else Path(path).read_text())
            sizes = facts.pop("token_bytes", None)
            return cls(**facts, token_bytes=None if sizes is None else tuple(sizes))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}: cannot be read ({error}); token files are made by "
                "`hvdtrain data tokenize`, which writes it next to them"
            ) from None


class RemoteTokens:
    """Tokens of a remote token file. A slice is read when it is converted to a numpy array.

    Args:
        span: numbers of its tokens in the file.
        ranges: reads the file.
    """

    def __init__(self, file: RemoteFile, span: range, ranges: ByteRanges) -> None:
        self.file = file
        self.dtype = DTYPES[file.suffix]
        self._span = span
        self._ranges = ranges

    def __len__(self) -> int:
        return len(self._span)

    def __getitem__(self, which: slice) -> RemoteTokens:
        return RemoteTokens(self.file, self._span[which], self._ranges)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> TokenArray:
        start, stop = self._span.start, self._span.stop
        size = self.dtype.itemsize
        content = self._ranges.read(self.file, start * size, stop * size)
        return np.frombuffer(content, self.dtype).astype(dtype or self.dtype)


AnyTokens = TokenArray | RemoteTokens


class TokenWindows(Dataset[Tensor]):
    """Sample i: the tokens [i*context, i*context + context + 1), inputs and shifted targets.

    Windows cross the borders of the arrays, as if they were one array.

    Args:
        arrays: tokens, 1-D, at least context + 1 of them together.
        context: number of tokens a sample trains on.
        vocab_size: tokens must be less; None: any token is valid.

    Attributes:
        shard_samples: number of samples that begin in each array, int64.
    """

    def __init__(
        self, arrays: Sequence[AnyTokens], context: int, vocab_size: int | None = None
    ) -> None:
        self.arrays = arrays
        self.context = context
        self._vocab_size = vocab_size
        self.starts = np.cumsum([0] + [len(a) for a in arrays])
        self.tokens = int(self.starts[-1])
        first_samples = np.minimum(-(-self.starts // context), len(self))
        self.shard_samples = np.diff(first_samples).astype(np.int64)

    def __len__(self) -> int:
        return max(0, (self.tokens - 1) // self.context)

    def __getitem__(self, index: int) -> Tensor:
        """int64 of shape (context + 1,); raise UserError if a token is not in the vocabulary."""
        start = index * self.context
        tokens = self._read(start, start + self.context + 1)
        if self._vocab_size is not None and (largest := int(tokens.max())) >= self._vocab_size:
            raise self._beyond(start + int(tokens.argmax()), largest)
        return torch.from_numpy(tokens)

    def _beyond(self, place: int, token: int) -> UserError:
        file = _token_file(self.arrays[int(np.searchsorted(self.starts, place, side="right")) - 1])
        vocab_size = self._vocab_size or 0
        if file is not None:
            return UserError(f"{file}: {_outside(token, vocab_size)}")
        return UserError(
            f"data.tokenizer: token {token} is outside the vocabulary of {vocab_size} tokens: the "
            "token numbers have gaps"
        )

    def _read(self, start: int, stop: int) -> NDArray[np.int64]:
        out = np.empty(stop - start, dtype=np.int64)
        at = start
        i = int(np.searchsorted(self.starts, start, side="right")) - 1
        while at < stop:
            end = min(stop, int(self.starts[i + 1]))
            out[at - start : end - start] = self.arrays[i][
                at - self.starts[i] : end - self.starts[i]
            ]
            at, i = end, i + 1
        return out

    def fingerprint(self) -> Fingerprint:
        """16 hex digits that change with the size or the ends of any array.

        The version that its server tells stands for the content of a remote file.
        """
        whole, contents = hashlib.sha256(), []
        for array in self.arrays:
            parts = [f"{len(array)} {array.dtype.str} ".encode()]
            if isinstance(array, RemoteTokens):
                parts.append(f"{array.file.stat()} ".encode())
            else:
                ends = (array[: 1 << 20], array[-(1 << 20) :])
                parts += [np.ascontiguousarray(part).tobytes() for part in ends]
            for part in parts:
                whole.update(part)
            contents.append(hashlib.sha256(b"".join(parts)).hexdigest()[:16])
        files = [file for file in map(_token_file, self.arrays) if file is not None]
        facts: list[FileFacts] = []
        if len(files) == len(contents):
            sizes = [len(array) * array.dtype.itemsize for array in self.arrays]
            columns = names_below_root(files), self.shard_samples.tolist(), sizes, contents
            facts = [FileFacts(*row) for row in zip(*columns, strict=True)]
        return Fingerprint(whole.hexdigest()[:16], facts)


def _token_file(array: AnyTokens) -> DataFile | None:
    """The token file of an array; None: it has another source."""
    if isinstance(array, RemoteTokens):
        return array.file
    path = getattr(array, "filename", None)  # of np.memmap
    return Path(path) if path is not None and Path(path).suffix in DTYPES else None


def _outside(token: int, vocab_size: int) -> str:
    return (
        f"token {token} is outside the vocabulary of {vocab_size} tokens in {_META}: check the "
        "tokens, the suffix, which sets their size (.u16 or .u32), and vocab_size"
    )


def with_separator(tokens: TokenArray, separator: int | None) -> TokenArray:
    """Append the separator, if any, to the tokens of a document."""
    return tokens if separator is None else np.append(tokens, tokens.dtype.type(separator))


def read_token_files(key: str, patterns: Sequence[str]) -> tuple[list[AnyTokens], TokenMeta]:
    """Memory-map local token files; open remote ones.

    Args:
        key: the configuration key the patterns come from, for messages.
        patterns: files, directories, globs or URLs.

    Raises:
        UserError: no file, a wrong suffix, an empty file, files of different vocabularies, or
            content that is not tokens of the vocabulary, as far as the start of a file shows it.
    """
    paths = find_files(key, patterns, suffixes=tuple(DTYPES))
    of_directories = {os.path.dirname(str(path)): path for path in paths}
    metas = {TokenMeta.read(path) for path in of_directories.values()}
    if len(metas) > 1:
        raise UserError(f"{key}: these token files were made with different tokenizers: {metas}")
    for path in paths:
        # Of remote files one per directory: each costs a request.
        if isinstance(path, Path) or path in of_directories.values():
            _check_start(key, path, next(iter(metas)).vocab_size)
    arrays: list[AnyTokens] = []
    ranges = ByteRanges()
    for path in paths:
        if isinstance(path, RemoteFile):
            tokens, rest = divmod(path.size, DTYPES[path.suffix].itemsize)
            if rest:
                raise UserError(f"{key}: {path} has {path.size} bytes: it is truncated")
            arrays.append(RemoteTokens(path, range(tokens), ranges))
            continue
        try:
            arrays.append(np.memmap(path, dtype=DTYPES[path.suffix], mode="r"))
        except (OSError, ValueError) as error:
            raise UserError(f"{key}: {path}: {error}") from None
    return arrays, metas.pop()


def _check_start(key: str, path: DataFile, vocab_size: int) -> None:
    """Check that the start of a file consists of tokens; raise UserError if it does not."""
    head, dtype = beginning(path, HEAD_BYTES), DTYPES[path.suffix]
    content = kind_of(head) or (TEXT if is_text(head) else None)
    if content is not None:
        raise refusal(key, path, content)
    tokens = np.frombuffer(head[: len(head) - len(head) % dtype.itemsize], dtype)
    bits = 8 * dtype.itemsize
    upper = (vocab_size - 1) >> bits  # the largest upper half of a token of twice as many bits
    wider = path.stat().st_size % (2 * dtype.itemsize) == 0 and len(tokens) >= _FEWEST
    if wider and tokens[1::2].max() <= upper < tokens[::2].max():
        logger.warning(  # other tokens may have this form, too
            "%s: %s: every second number of %d bits is at most %d. If the tokens have %d bits, %s",
            key,
            path,
            bits,
            upper,
            2 * bits,
            "name the file *.u32" if bits == 16 else "store them with 32 bits",
        )
    if len(tokens) and tokens.max() >= vocab_size:
        raise UserError(f"{key}: {path}: {_outside(int(tokens.max()), vocab_size)}")


Tokens = TypeVar("Tokens", bound=Any)  # TokenArray, or AnyTokens


def split_end(tokens: Tokens, fraction: float) -> tuple[Tokens, Tokens]:
    """Split off the end for validation: (train, validation)."""
    at = len(tokens) - int(len(tokens) * fraction)
    return tokens[:at], tokens[at:]
