"""Samples of directories that `litdata` has written with `optimize`.

A sample is: uint32 length of each leaf; the leaves. A chunk of tokens has no lengths. Chunks that
are compressed with Zstandard require the extra `zstd`, rows of Arrow `parquet`, images `image`.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from hvdtrain.data.chunks import INDEX, Opened, broken_index, check_size, chunk_path, read_index
from hvdtrain.data.files import Fingerprint, of_files
from hvdtrain.data.lit_chunks import ArrowChunk, Chunk, PlainChunk, open_chunk
from hvdtrain.data.lit_leaves import leaf_decoder
from hvdtrain.errors import UserError
from hvdtrain.untrusted import is_of, parse_json, shown

_TREES, _TOKENS = "PyTreeLoader", "TokensLoader"

Build = Callable[[Iterator[Any]], Any]


class _ChunkFile(NamedTuple):
    """A chunk of the index.

    Args:
        items: that were written to it.
        size: in bytes, not compressed.
        tokens: number of its tokens, if it is of tokens.
        samples: number of its samples, or windows.
    """

    path: Path
    items: int
    size: int
    tokens: int
    samples: int


class LitSamples(Dataset[Any]):
    """A sample is what `StreamingDataset` of litdata returns.

    Of tokens, a sample is a window of one chunk: windows do not overlap, and the tokens at the end
    of a chunk that do not fill a window are skipped, as by `TokensLoader`. Compressed chunks are
    decompressed into memory. Each process keeps the most recently used ones, up to 256 MB.

    Args:
        directory: with an index.json.
        window: number of tokens of a sample, if the directory is of tokens.
        key: what the directory comes from, for messages.

    Attributes:
        shard_samples: number of samples of each chunk, int64, in the order of the samples.

    Raises:
        UserError: the index or a chunk is broken, encrypted, or has leaves that are not read.
    """

    def __init__(self, directory: str, window: int | None = None, key: str = "LitSamples") -> None:
        self._directory, self._window, self._key = str(directory), window, key
        self._opened = Opened()
        self._open()

    def _open(self) -> None:
        self._path, index = read_index(self._key, self._directory)
        config = index.get("config")
        if not isinstance(config, dict) or not is_of(index.get("chunks"), list[dict[str, Any]]):
            raise UserError(f"{self._path / INDEX} is not an index of litdata")
        self._check(config)
        names = config.get("data_format")
        if not is_of(names, list[str]) or not names:
            raise broken_index(self._path, f"data_format is {shown(names)}")
        self._leaves = [
            leaf_decoder(f"{self._path}: leaf {number} of a sample", name)
            for number, name in enumerate(names, 1)
        ]
        if self._window is not None:
            if not names[0].startswith("no_header_"):
                raise broken_index(self._path, f"tokens have the format {shown(names)}")
            self._token_bytes = self._leaves[0](bytes(16), 0, 16).itemsize
        self._lengths = struct.Struct(f"<{len(names)}I")
        self._build, leaves = _builder(self._path, config.get("data_spec"))
        if leaves != len(names):
            raise broken_index(
                self._path, f"data_spec has {leaves} leaves, data_format {len(names)}"
            )
        chunks = [self._chunk_file(about) for about in index["chunks"]]
        self._chunks = [chunk for chunk in chunks if chunk.samples]
        if not self._chunks:
            of_tokens = f", or no chunk with {self._window} tokens" if self._window else ""
            raise UserError(f"{self._path / INDEX} has no samples{of_tokens}")
        self.shard_samples = np.array([chunk.samples for chunk in self._chunks], dtype=np.int64)
        self._starts: list[int] = np.cumsum([0, *self.shard_samples]).tolist()

    def __getstate__(self) -> dict[str, Any]:
        # Functions of leaves cannot be pickled.
        left = dict.fromkeys(("_leaves", "_lengths", "_build", "_chunks", "_starts"))
        return {**self.__dict__, **left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._starts[-1]:
            raise IndexError(index)
        number = bisect_right(self._starts, index) - 1
        chunk = self._opened.get(number)
        if chunk is None:
            chunk = self._chunk(number)
        row = index - self._starts[number]
        try:
            if isinstance(chunk, ArrowChunk):
                return chunk.row(row)
            if self._window is not None:
                return self._tokens(chunk, self._chunks[number], row)
            content, begin, end = chunk.place(row)
            lengths = self._lengths.unpack_from(content, begin)
            begin += self._lengths.size
            leaves = []
            for length, decode in zip(lengths, self._leaves, strict=True):
                leaves.append(decode(content, begin, begin + length))
                begin += length
            if begin != end:
                raise ValueError(f"its leaves end {begin - end} bytes after it")
            return self._build(iter(leaves))
        except UserError:
            raise
        except Exception as error:  # each format has its own
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{self.where(index)} is damaged ({reason}): copy it again") from None

    def where(self, index: int) -> str:
        """Location such as "chunk-0-0.bin: sample 7", for messages."""
        chunk = bisect_right(self._starts, index) - 1
        return f"{self._chunks[chunk].path}: sample {index - self._starts[chunk] + 1}"

    def fingerprint(self) -> Fingerprint:
        """16 hex digits that change with the chunks' names, numbers of samples, or content."""
        paths = [self._path / INDEX, *(chunk.path for chunk in self._chunks)]
        return of_files(paths, [0, *self.shard_samples.tolist()])

    def _tokens(self, chunk: PlainChunk, file: _ChunkFile, row: int) -> Any:
        size = (self._window or 0) * self._token_bytes
        begin = 4 * (file.items + 2) + row * size
        return self._leaves[0](chunk.content, begin, begin + size)

    def _chunk(self, number: int) -> Chunk:
        file = self._chunks[number]
        chunk, size = open_chunk(
            file.path, file.items, file.size, self._each, partial(self._opened.grow, number)
        )
        if self._window is not None:
            tokens = file.tokens * self._token_bytes
            fits = isinstance(chunk, PlainChunk) and not self._each
            if not fits or file.size < 4 * (file.items + 2) + tokens:
                raise UserError(f"{file.path} does not have {file.tokens} tokens: copy it again")
        self._opened.add(number, chunk, size)
        return chunk

    def _check(self, config: dict[str, Any]) -> None:
        if config.get("encryption"):
            raise UserError(f"{self._path} is encrypted: write it without encryption")
        compression = str(config.get("compression") or "zstd").partition(":")[0]
        if compression != "zstd":
            raise UserError(f"{self._path} is compressed with {shown(compression)}, not zstd")
        level = config.get("compression_level")
        self._each, self._whole = level == "sample", level in (None, "chunk")
        # Older versions do not store the loader.
        loader = config.get("item_loader") or (_TREES if self._window is None else _TOKENS)
        if loader not in (_TREES, _TOKENS):
            raise UserError(f"{self._path} is for {shown(loader)}: only {_TREES}, {_TOKENS} work")
        if loader == _TOKENS and self._window is None:
            raise UserError(f"{self._key}: {self._path} has tokens: add the length of a window")
        if loader == _TREES and self._window is not None:
            raise UserError(f"{self._key}: {self._path} has samples, not tokens: omit the window")
        if self._window is not None and not (is_of(self._window, int) and self._window >= 1):
            raise UserError(f"{self._key}: a window has at least 1 token, not {self._window}")

    def _chunk_file(self, about: dict[str, Any]) -> _ChunkFile:
        path = chunk_path(self._path, about.get("filename"))
        items: Any = about.get("chunk_size")
        size: Any = about.get("chunk_bytes")
        tokens: Any = about.get("dim") or 0
        if not all(is_of(value, int) and value >= 0 for value in (items, size, tokens)):
            raise broken_index(self._path, f"a chunk is {shown(about)}")
        if not (self._whole and ".zstd" in path.name):  # then it is the size before compression
            check_size(path, size)
        samples = items if self._window is None else tokens // self._window
        return _ChunkFile(path, items, size, tokens, samples)


def _builder(path: Path, spec: Any) -> tuple[Build, int]:
    """Return the function that builds a sample of its leaves, and the number of leaves.

    Raises:
        UserError: the structure has other nodes than dicts, lists and tuples.
    """
    try:
        _, root = parse_json(spec)
        leaves: list[None] = []
        return _build_node(path, root, leaves), len(leaves)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        raise broken_index(path, f"data_spec is {shown(spec)}") from None


def _build_node(path: Path, node: dict[str, Any], leaves: list[None]) -> Build:
    kind = node["type"]
    if kind is None:
        leaves.append(None)
        return next
    parts = [_build_node(path, child, leaves) for child in node["children_spec"]]
    if kind == "builtins.dict":
        keys = parse_json(node["context"])
        if len(keys) != len(parts):
            raise ValueError(keys)
        if all(part is next for part in parts):
            return lambda values: dict(zip(keys, values, strict=False))
        return lambda values: {key: part(values) for key, part in zip(keys, parts, strict=True)}
    if kind == "builtins.list":
        return lambda values: [part(values) for part in parts]
    if kind == "builtins.tuple":
        return lambda values: tuple([part(values) for part in parts])
    raise UserError(f"{path} has samples with {shown(kind)}: write dicts, lists and tuples")
