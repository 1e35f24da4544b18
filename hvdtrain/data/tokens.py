"""Token sequences: windows over arrays of tokens, in memory or memory-mapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.files import expand
from hvdtrain.errors import UserError

TokenArray = NDArray[Any]  # 1-D, any unsigned integer type

# The suffix of a token file determines its dtype.
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
        (directory / "tokens.json").write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, directory: Path) -> TokenMeta:
        path = directory / "tokens.json"
        try:
            facts = json.loads(path.read_text())
            sizes = facts.pop("token_bytes", None)
            return cls(**facts, token_bytes=None if sizes is None else tuple(sizes))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}: cannot be read ({error}); token files are made by "
                "`hvdtrain data tokenize`, which writes it next to them"
            ) from None


class TokenWindows(Dataset[Tensor]):
    """Sample i: the tokens [i*context, i*context + context + 1), inputs and shifted targets.

    Windows cross the borders of the arrays, as if they were one array.

    Args:
        arrays: tokens, 1-D, at least context + 1 of them together.
        context: number of tokens a sample trains on.

    Attributes:
        shard_samples: number of samples that begin in each array, int64.
    """

    def __init__(self, arrays: Sequence[TokenArray], context: int) -> None:
        self.arrays = arrays
        self.context = context
        self.starts = np.cumsum([0] + [len(a) for a in arrays])
        self.tokens = int(self.starts[-1])
        first_samples = np.minimum(-(-self.starts // context), len(self))
        self.shard_samples = np.diff(first_samples).astype(np.int64)

    def __len__(self) -> int:
        return max(0, (self.tokens - 1) // self.context)

    def __getitem__(self, index: int) -> Tensor:
        """int64 of shape (context + 1,)."""
        start = index * self.context
        return torch.from_numpy(self._read(start, start + self.context + 1))

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

    def fingerprint(self) -> str:
        """16 hex digits that change with the size or the ends of any array."""
        digest = hashlib.sha256()
        for array in self.arrays:
            digest.update(f"{len(array)} {array.dtype.str} ".encode())
            for part in (array[: 1 << 20], array[-(1 << 20) :]):
                digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]


def with_separator(tokens: TokenArray, separator: int | None) -> TokenArray:
    """Append the separator, if any, to the tokens of a document."""
    return tokens if separator is None else np.append(tokens, tokens.dtype.type(separator))


def read_token_files(key: str, patterns: Sequence[str]) -> tuple[list[TokenArray], TokenMeta]:
    """Memory-map token files.

    Args:
        key: the configuration key the patterns come from, for messages.
        patterns: files, directories or globs.

    Raises:
        UserError: no file, a wrong suffix, an empty file, or files of different vocabularies.
    """
    paths = expand(key, patterns, suffixes=tuple(DTYPES))
    metas = {TokenMeta.read(directory) for directory in {path.parent for path in paths}}
    if len(metas) > 1:
        raise UserError(f"{key}: these token files were made with different tokenizers: {metas}")
    arrays: list[TokenArray] = []
    for path in paths:
        try:
            arrays.append(np.memmap(path, dtype=DTYPES[path.suffix], mode="r"))
        except (OSError, ValueError) as error:
            raise UserError(f"{key}: {path}: {error}") from None
    return arrays, metas.pop()


def split_end(tokens: TokenArray, fraction: float) -> tuple[TokenArray, TokenArray]:
    """Split off the end for validation: (train, validation)."""
    at = len(tokens) - int(len(tokens) * fraction)
    return tokens[:at], tokens[at:]
