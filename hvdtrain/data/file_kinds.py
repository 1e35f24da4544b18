"""Kinds of files by their first bytes, to refuse files that their name or a key describes wrongly.

Compressed files, archives, arrays and tables begin with magic bytes, and text has no NUL bytes, or
few that a faulty program left in it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from hvdtrain.data.remote import REQUESTS_AT_ONCE, DataFile, RemoteFile, beginning
from hvdtrain.errors import UserError

# Bytes at the start of a file that show its format; as many as git examines to recognize binary
# files.
HEAD_BYTES = 8000
_SHORTEST_TEXT = 64
_MOST_BYTES = 4  # of a character
_TEXT_PER_NUL = 100  # bytes


class FileKind(NamedTuple):
    """What a file contains.

    Args:
        what: completes "FILE is ...".
        advice: how it can be read; {shell} and {python} stand for its path.
    """

    what: str
    advice: str


_TO_TOKENS = ".astype('<u2').tofile('train.u16')` writes a token file"
_LLM_C = FileKind(
    "a token file of llm.c, which has a header", "data.source tokens reads it as *.bin"
)
_TO_RECORDS = "convert it to JSON lines or Parquet"
TAR_ARCHIVE = FileKind("a tar archive", "unpack it with `tar -xf {shell}`")
PARQUET_FILE = FileKind(
    "a Parquet file", "name it *.parquet; data.source parquet reads a column of text"
)
ARROW_FILE = FileKind("an Arrow file", "data.source arrow reads a column of text in *.arrow")
# Regular expression of the magic bytes, and the kind. None of them is likely to begin a text or
# a token file.
_MAGIC = {
    rb"\x1f\x8b\x08[\x00-\x1f]": FileKind(
        "compressed with gzip", "decompress it with `gunzip {shell}`"
    ),
    rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": FileKind(
        "compressed with Zstandard", "decompress it with `zstd -d --rm {shell}`"
    ),
    rb"BZh[1-9]1AY&SY": FileKind("compressed with bzip2", "decompress it with `bunzip2 {shell}`"),
    rb"\xfd7zXZ\x00": FileKind("compressed with xz", "decompress it with `unxz {shell}`"),
    rb"\x04\x22\x4d\x18": FileKind(
        "compressed with LZ4", "decompress it with `lz4 -dm --rm {shell}`"
    ),
    rb"PK\x03\x04.{26}[^\x00]{1,255}?\.npy": FileKind(
        "an archive of NumPy arrays", "`numpy.load({python})['NAME']" + _TO_TOKENS
    ),
    rb"PK\x03\x04.{26}[^\x00]{1,255}?/data\.pkl": FileKind("a file of torch.save", _TO_RECORDS),
    rb"PK\x03\x04": FileKind("a zip archive", "unpack it with `unzip {shell}`"),
    rb".{257}ustar": TAR_ARCHIVE,
    rb"PAR1[\x00-\x08\x0e-\x1f]": PARQUET_FILE,  # a text may begin with the letters
    rb"ARROW1\x00\x00|\xff{4}.{2}[\x00-\x0f]\x00": ARROW_FILE,
    rb"\x93NUMPY": FileKind(
        "a NumPy array", "data.source tokens reads an array of integers in *.npy"
    ),
    rb"\x89HDF\r\n\x1a\n": FileKind("an HDF5 file", _TO_RECORDS),
    rb".{4}\x00{4}\{\s*\"": FileKind("a SafeTensors file", _TO_RECORDS),
    rb"\x80[\x04\x05]\x95.{4}\x00{4}": FileKind("a pickle", _TO_RECORDS),
    rb"%PDF-": FileKind("a PDF file", "extract its text with `pdftotext {shell}`"),
    rb"\x88\xd8\x34\x01\x01\x00{3}": _LLM_C,
    rb"\xa1\xd9\x34\x01\x07\x00{3}": _LLM_C,
    rb"MMIDIDX\x00\x00": FileKind(
        "the index of a Megatron dataset", "data.source tokens reads its *.bin"
    ),
}
_KINDS = [(re.compile(magic, re.DOTALL), kind) for magic, kind in _MAGIC.items()]
TEXT = FileKind("text", "tokenize it with `hvdtrain data tokenize --input {shell} --out DIRECTORY`")
_UTF_16 = FileKind("UTF-16 text", "convert it with `iconv -f UTF-16 -t UTF-8 {shell} > utf-8.txt`")
_BINARY = FileKind(
    "not text, because it has NUL bytes",
    "name the text alone, such as with '**/*.txt'; token files are read with data.source tokens",
)


def kind_of(head: bytes) -> FileKind | None:
    """The kind whose magic bytes a file begins with; None: no known one.

    Args:
        head: the file's first HEAD_BYTES, or all if it is shorter.
    """
    return next((kind for magic, kind in _KINDS if magic.match(head)), None)


def is_text(head: bytes) -> bool:
    """Whether a file begins as UTF-8 text that is long enough to be no coincidence."""
    characters = head.decode("utf-8", "ignore").encode()
    return (
        len(head) >= _SHORTEST_TEXT
        and len(head) - len(characters) < _MOST_BYTES
        and re.fullmatch(rb"[\t\n\r\x20-\xff]*", head) is not None
    )


def refusal(key: str, path: DataFile, kind: FileKind) -> UserError:
    """The error for a file that would be read as another kind; `key`: names the file."""
    return UserError(f"{key}: {path} is {_filled(kind, path)}")


def described(path: DataFile, expected: FileKind | None = None) -> str:
    """What a file is and how it can be read, after "FILE is", for messages about unreadable files.

    Empty if its kind is unknown, or the expected one.
    """
    try:
        kind = kind_of(beginning(path, HEAD_BYTES))
    except UserError:
        return ""
    return _filled(kind, path) if kind and kind is not expected else ""


def check_text(key: str, files: Sequence[DataFile]) -> None:
    """Check that files, which are read as text, begin as text.

    Raises:
        UserError: a file is not text, or cannot be read.
    """
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        for path, kind in zip(files, pool.map(_other_than_text, files), strict=True):
            if kind is not None:
                raise refusal(key, path, kind)


def _other_than_text(path: DataFile) -> FileKind | None:
    head = beginning(path, HEAD_BYTES)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _UTF_16
    return kind_of(head) or (_BINARY if _is_binary(head) else None)


def _is_binary(head: bytes) -> bool:
    """Whether a file has NUL bytes, and not only some in a text of printable characters."""
    nuls = head.count(b"\0")
    return nuls > 0 and (nuls * _TEXT_PER_NUL > len(head) or not is_text(head.replace(b"\0", b"")))


def _filled(kind: FileKind, path: DataFile) -> str:
    file = path.name if isinstance(path, RemoteFile) else str(path)
    advice = kind.advice.format(shell=shlex.quote(file), python=repr(file))
    return f"{kind.what}: {advice}"
