"""Files of tokens, as several programs write them.

| suffix | written by | dtype of a token | borders of documents |
| --- | --- | --- | --- |
| .u16, .u32 | hvdtrain data tokenize | suffix | - |
| .bin with .idx | Megatron-LM, datatrove | index | index |
| .bin with a header | llm.c | header | - |
| .bin | nanoGPT | tokens.json | - |
| .npy | numpy.save | header | - |
| .npy without a header | OLMo-core | tokens.json | - |
| .ds | datatrove | .ds.metadata, or tokens.json | .ds.index |

A format is a function in `_FORMATS`, which returns where a file's tokens are.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.file_kinds import TEXT, is_text, kind_of, refusal
from hvdtrain.data.remote import DataFile, RemoteFile, read_url, url_exists
from hvdtrain.errors import UserError
from hvdtrain.log import logger

# dtype of a token by its file's suffix, in files of hvdtrain.
DTYPES: dict[str, np.dtype[Any]] = {".u16": np.dtype("<u2"), ".u32": np.dtype("<u4")}
SUFFIXES = (*DTYPES, ".bin", ".npy", ".ds")


class DocumentStarts:
    """Positions of the first token of each document of a file, ascending, from an index.

    The index stays on disk: a search reads a few of its numbers.

    Args:
        positions: int64 (documents,), in tokens or bytes.
        end: number of tokens of the file.
        numbers: int64 (documents,), numbers of the first sequences of documents in `positions`, or
            their number for an empty document at the end; None: each sequence is a document.
        unit: of the positions, in tokens: 1, or bytes per token.
    """

    def __init__(
        self,
        positions: NDArray[Any],
        end: int,
        numbers: NDArray[Any] | None = None,
        unit: int = 1,
    ) -> None:
        self._positions, self._numbers, self._unit = positions, numbers, unit
        self._end = end
        self._order = range(len(positions if numbers is None else numbers))

    def _start(self, document: int) -> int:
        place = document if self._numbers is None else int(self._numbers[document])
        if place >= len(self._positions):
            return self._end
        return int(self._positions[place]) // self._unit

    def numbered(self, start: int, stop: int) -> NDArray[np.int64]:
        """int64 (stop - start,): the number of each token's document; 0 for that of `start`."""
        first = bisect_right(self._order, start, key=self._start)
        last = bisect_left(self._order, stop, lo=first, key=self._start)
        found = np.zeros(stop - start, dtype=np.int64)
        for document in range(first, last):
            found[self._start(document) - start] += 1
        return found.cumsum()


class TokenLayout(NamedTuple):
    """Where the tokens of a file are.

    Args:
        dtype: of a token.
        start: bytes before the first token.
        tokens: their number; None: all up to the end of the file.
        documents: where documents begin; None: unknown.
    """

    dtype: np.dtype[Any]
    start: int = 0
    tokens: int | None = None
    documents: DocumentStarts | None = None


def layout_of(
    key: str, file: DataFile, head: bytes, dtype: np.dtype[Any] | None = None
) -> TokenLayout:
    """Find out where the tokens of a file are, by its suffix, its first bytes and its neighbors.

    Args:
        key: names the file, for messages.
        head: the file's first HEAD_BYTES, or all if it is shorter.
        dtype: of a token of a file that does not tell it; None: unknown.

    Raises:
        UserError: the file is of another kind, broken, or its dtype is unknown.
    """
    try:
        for recognize in _FORMATS:
            if (layout := recognize(file, head)) is not None:
                return layout
        dtype = DTYPES.get(file.suffix, dtype)
        found = None if dtype is None else _with_documents(file, dtype)
    except (ValueError, EOFError) as error:
        raise UserError(f"{key}: {file}: {error}") from None
    content = kind_of(head) or (TEXT if is_text(head) else None)
    if content is not None:
        raise refusal(key, file, content)
    if found is None:
        raise UserError(
            f"{key}: {file} does not tell the size of its tokens: write it into tokens.json next "
            'to it, such as {"vocab_size": 50257, "tokenizer": "gpt2", "dtype": "uint16"}'
        )
    return found


# --- formats -------------------------------------------------------------------


# https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py: 256 int32 numbers, of which
# the first are a magic number, the version and the number of tokens.
_LLM_C_BYTES = 1024
_LLM_C: dict[tuple[int, int], np.dtype[Any]] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}


def _llm_c(file: DataFile, head: bytes) -> TokenLayout | None:
    if file.suffix != ".bin" or len(head) < _LLM_C_BYTES:
        return None
    magic, version, tokens = np.frombuffer(head[:12], "<i4").tolist()
    if magic not in {known for known, _ in _LLM_C}:
        return None
    if (magic, version) not in _LLM_C:
        raise ValueError(f"a token file of llm.c of the unknown version {version}")
    return TokenLayout(_LLM_C[magic, version], _LLM_C_BYTES, tokens)


def _numpy(file: DataFile, head: bytes) -> TokenLayout | None:
    if file.suffix != ".npy" or not head.startswith(b"\x93NUMPY"):
        return None
    opened = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(opened)
        first = version == (1, 0)
        form = np.lib.format
        read = form.read_array_header_1_0 if first else form.read_array_header_2_0
        shape, _, dtype = read(opened)
    except Exception as error:  # also those of Python's parser
        raise ValueError(f"its header is damaged ({error}): copy it again") from None
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ValueError(
            f"an array of shape {shape} and dtype {dtype}: tokens are an array of one dimension "
            "and an integer type"
        )
    return TokenLayout(dtype, opened.tell(), shape[0])


# https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_HEAD = np.dtype(
    [
        ("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"),
        ("documents", "<u8"),
    ]
)  # fmt: skip
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def _megatron(file: DataFile, head: bytes) -> TokenLayout | None:
    if file.suffix != ".bin":
        return None
    index = _sibling(file, f"{file.name.removesuffix('.bin')}.idx")
    if index is None or index[: len(_MEGATRON)].tobytes() != _MEGATRON:
        return None
    at = _MEGATRON_HEAD.itemsize
    facts = index[:at].view(_MEGATRON_HEAD)[0] if len(index) >= at else None
    if facts is None or facts["version"] != 1 or int(facts["dtype"]) not in _MEGATRON_DTYPES:
        raise ValueError("its *.idx has an unknown version or dtype")
    dtype = np.dtype(_MEGATRON_DTYPES[int(facts["dtype"])])
    sequences, documents = int(facts["sequences"]), int(facts["documents"])
    if len(index) < at + 12 * sequences + 8 * documents or not sequences:
        raise ValueError("its *.idx is truncated or has no sequence: copy it again")
    lengths = _part(index, at, sequences, "<i4")
    pointers = _part(index, at + 4 * sequences, sequences, "<i8")
    starts = _part(index, at + 12 * sequences, documents, "<i8")
    if documents and (starts[0] != 0 or starts[-1] != sequences):
        raise ValueError("its *.idx is damaged: copy it again")
    end = int(pointers[-1]) // dtype.itemsize + int(lengths[-1])
    # The last number is that of the sequences.
    return TokenLayout(dtype, 0, end, DocumentStarts(pointers, end, starts[:-1], dtype.itemsize))


def _part(index: NDArray[np.uint8], at: int, count: int, dtype: str) -> NDArray[Any]:
    # Not a view: the numbers are not aligned.
    return np.ndarray((count,), dtype, index, at)


# https://github.com/huggingface/datatrove/blob/main/src/datatrove/pipeline/tokens/tokenizer.py
_DATATROVE_DTYPES: dict[str, np.dtype[Any]] = {"2": np.dtype("<u2"), "4": np.dtype("<u4")}


def _datatrove(file: DataFile, head: bytes) -> TokenLayout | None:
    if file.suffix != ".ds":
        return None
    if _exists(file, f"{file.name}.loss"):
        logger.warning("%s: the loss mask next to it is not used: all tokens are trained on", file)
    found = _sibling(file, f"{file.name}.metadata")
    if found is None:
        return None
    name, _, size = found.tobytes().partition(b"\n")[0].decode(errors="replace").rpartition("|")
    if size not in _DATATROVE_DTYPES:
        raise ValueError(f"*.metadata next to it has an unknown size of tokens: {name}|{size}")
    return _with_documents(file, _DATATROVE_DTYPES[size])


def _with_documents(file: DataFile, dtype: np.dtype[Any]) -> TokenLayout:
    """The layout with the borders in *.ds.index: where documents end is where others begin.

    Raises:
        ValueError: the index is damaged.
    """
    index = _sibling(file, f"{file.name}.index") if file.suffix == ".ds" else None
    if index is None:
        return TokenLayout(dtype)
    if len(index) % 8 or not len(index):
        raise ValueError("*.index next to it is truncated: copy it again")
    ends = _part(index, 0, len(index) // 8, "<u8")
    end = int(ends[-1])
    return TokenLayout(dtype, tokens=end, documents=DocumentStarts(ends, end))


_FORMATS: tuple[Callable[[DataFile, bytes], TokenLayout | None], ...] = (
    _megatron, _llm_c, _numpy, _datatrove,
)  # fmt: skip


def _sibling(file: DataFile, name: str) -> NDArray[np.uint8] | None:
    """The bytes of another file in the same directory; None: there is none."""
    try:
        if isinstance(file, RemoteFile):
            try:
                return np.frombuffer(read_url(file.sibling(name)), np.uint8)
            except UserError as error:  # servers may forbid to look for files
                logger.warning("%s: %s next to it is taken as missing: %s", file, name, error)
                return None
        path = file.with_name(name)
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file}: {name} next to it: {error.strerror or error}") from None


def _exists(file: DataFile, name: str) -> bool:
    if isinstance(file, RemoteFile):
        return url_exists(file.sibling(name))
    return file.with_name(name).exists()
