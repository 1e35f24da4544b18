"""Token sequences: windows over arrays of tokens, in memory or in files."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.files import FileFacts, Fingerprint, names_below_root
from hvdtrain.data.remote import RemoteFile
from hvdtrain.data.token_files import FileTokens, outside_vocabulary
from hvdtrain.errors import UserError

TokenArray = NDArray[Any]  # 1-D, any unsigned integer type
AnyTokens = TokenArray | FileTokens


class TokenWindows(Dataset[Tensor]):
    """Sample i: the tokens [i*context, i*context + context + 1), inputs and shifted targets.

    Windows cross the borders of the arrays, as if they were one array.

    Args:
        arrays: tokens, 1-D, at least context + 1 of them together.
        context: number of tokens a sample trains on.
        vocab_size: tokens must be less; None: any token is valid.
        documents: also give the number of each token's document; the arrays know the borders.

    Attributes:
        shard_samples: number of samples that begin in each array, int64.
    """

    def __init__(
        self,
        arrays: Sequence[AnyTokens],
        context: int,
        vocab_size: int | None = None,
        documents: bool = False,
    ) -> None:
        self.arrays = arrays
        self.context = context
        self._vocab_size = vocab_size
        self._documents = documents
        self._signed = any(array.dtype.kind == "i" for array in arrays)
        dtypes = {array.dtype for array in arrays}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)
        self.starts = np.cumsum([0] + [len(a) for a in arrays])
        self._starts: list[int] = self.starts.tolist()
        self._mapped: list[Any] = [a.mapped if isinstance(a, FileTokens) else a for a in arrays]
        self.tokens = int(self.starts[-1])
        # All samples, if they are in one array in memory or in a mapped file.
        self._rows: TokenArray | None = None
        if len(self._mapped) == 1 and isinstance(self._mapped[0], np.ndarray) and len(self):
            self._rows = sliding_window_view(self._mapped[0], context + 1)[::context]
        first_samples = np.minimum(-(-self.starts // context), len(self))
        self.shard_samples = np.diff(first_samples).astype(np.int64)

    def __len__(self) -> int:
        return max(0, (self.tokens - 1) // self.context)

    def __getitem__(self, index: int) -> Tensor:
        """Return a sample.

        Returns:
            int64 (context + 1,): tokens; with `documents` (2, context + 1): also the number of each
            token's document, from 0 in each sample.

        Raises:
            UserError: a token is not in the vocabulary.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return several samples."""
        width = self.context + 1
        tokens = self._windows(indices).astype(np.int64, copy=False)
        if self._vocab_size is not None and (largest := int(tokens.max())) >= self._vocab_size:
            raise self._beyond(indices, int(tokens.argmax()), largest)
        if self._signed and (smallest := int(tokens.min())) < 0:
            raise self._beyond(indices, int(tokens.argmin()), smallest)
        if self._documents:
            starts = (index * self.context for index in indices)
            numbers = [self._numbers(start, start + width) for start in starts]
            return [*torch.from_numpy(np.stack([tokens, numbers], axis=1)).unbind()]
        return [*torch.from_numpy(tokens).unbind()]

    def _windows(self, indices: Sequence[int]) -> TokenArray:
        """Return (samples, context + 1) tokens of the arrays' type, to be converted all at once."""
        if self._rows is not None:
            return self._rows[np.asarray(indices, dtype=np.int64)]
        width = self.context + 1
        windows = np.empty((len(indices), width), dtype=self._dtype)
        for window, index in zip(windows, indices, strict=True):
            self._read(index * self.context, index * self.context + width, window)
        return windows

    def _beyond(self, indices: Sequence[int], at: int, token: int) -> UserError:
        """The error for a token outside the vocabulary; `at`: its place in these samples."""
        sample, column = divmod(at, self.context + 1)
        place = indices[sample] * self.context + column
        array = self.arrays[int(np.searchsorted(self.starts, place, side="right")) - 1]
        vocab_size = self._vocab_size or 0
        if isinstance(array, FileTokens):
            return UserError(f"{array.file}: {outside_vocabulary(token, vocab_size)}")
        return UserError(
            f"data.tokenizer: token {token} is outside the vocabulary of {vocab_size} tokens: the "
            "token numbers have gaps"
        )

    def _read(self, start: int, stop: int, out: TokenArray) -> None:
        i = bisect_right(self._starts, start) - 1
        if stop <= self._starts[i + 1]:  # as almost always
            out[:] = self._mapped[i][start - self._starts[i] : stop - self._starts[i]]
            return
        for at, part in self._parts(start, stop):
            out[at - start : at - start + len(part)] = part

    def _numbers(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the number of the document of each token, from 0."""
        out, next_number = np.empty(stop - start, dtype=np.int64), 0
        for at, part in self._parts(start, stop):
            assert isinstance(part, FileTokens)
            out[at - start : at - start + len(part)] = numbers = part.documents() + next_number
            next_number = int(numbers[-1]) + 1  # no document continues in another file
        return out

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, AnyTokens]]:
        """Yield (number of its first token, tokens) of each array's part of these tokens."""
        i = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            first, end = int(self.starts[i]), min(stop, int(self.starts[i + 1]))
            yield start, self.arrays[i][start - first : end - first]
            start, i = end, i + 1

    def fingerprint(self) -> Fingerprint:
        """16 hex digits that change with the size or the ends of any array.

        The version that its server tells stands for the content of a remote file.
        """
        whole, contents = hashlib.sha256(), []
        for array in self.arrays:
            parts = [f"{len(array)} {array.dtype.str} ".encode()]
            if isinstance(array, FileTokens) and isinstance(array.file, RemoteFile):
                parts.append(f"{array.file.stat()} ".encode())
            else:
                ends = (array[: 1 << 20], array[-(1 << 20) :])
                parts += [np.ascontiguousarray(part).tobytes() for part in ends]
            for part in parts:
                whole.update(part)
            contents.append(hashlib.sha256(b"".join(parts)).hexdigest()[:16])
        files = [array.file for array in self.arrays if isinstance(array, FileTokens)]
        facts: list[FileFacts] = []
        if len(files) == len(contents):
            sizes = [len(array) * array.dtype.itemsize for array in self.arrays]
            columns = names_below_root(files), self.shard_samples.tolist(), sizes, contents
            facts = [FileFacts(*row) for row in zip(*columns, strict=True)]
        return Fingerprint(whole.hexdigest()[:16], facts)


def tokens_of(samples: Tensor) -> Tensor:
    """The tokens of samples of TokenWindows, without the numbers of their documents."""
    return samples[..., 0, :] if samples.dim() == 3 else samples


def with_separator(tokens: TokenArray, separator: int | None) -> TokenArray:
    """Append the separator, if any, to the tokens of a document."""
    return tokens if separator is None else np.append(tokens, tokens.dtype.type(separator))


Tokens = TypeVar("Tokens", bound=Any)  # TokenArray, or AnyTokens


def split_end(tokens: Tokens, fraction: float) -> tuple[Tokens, Tokens]:
    """Split off the end for validation: (train, validation)."""
    at = len(tokens) - int(len(tokens) * fraction)
    return tokens[:at], tokens[at:]
