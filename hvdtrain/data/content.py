"""Formats of files by their first bytes, so that no file is read as what it is not.

A file's name says how it is read. Its first bytes show whether that is possible: compressed files,
archives, arrays and tables begin with magic bytes, and text has no NUL bytes.
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


class Content(NamedTuple):
    """What a file contains.

    Args:
        what: completes "FILE is ...".
        advice: how it can be read; {shell} and {python} stand for its path.
    """

    what: str
    advice: str


_TO_TOKENS = "`numpy.load({python}).astype('<u2').tofile('train.u16')` writes a token file"
_TO_RECORDS = "convert it to JSON lines or Parquet"
TAR_ARCHIVE = Content("a tar archive", "unpack it with `tar -xf {shell}`")
PARQUET_FILE = Content(
    "a Parquet file", "name it *.parquet; data.source parquet reads a column of text"
)
# Regular expression of the magic bytes, and the content. None of them is likely to begin a text or
# a token file.
_MAGIC = {
    rb"\x1f\x8b\x08[\x00-\x1f]": Content(
        "compressed with gzip", "decompress it with `gunzip {shell}`"
    ),
    rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": Content(
        "compressed with Zstandard", "decompress it with `zstd -d --rm {shell}`"
    ),
    rb"BZh[1-9]1AY&SY": Content("compressed with bzip2", "decompress it with `bunzip2 {shell}`"),
    rb"\xfd7zXZ\x00": Content("compressed with xz", "decompress it with `unxz {shell}`"),
    rb"\x04\x22\x4d\x18": Content(
        "compressed with LZ4", "decompress it with `lz4 -d --rm {shell}`"
    ),
    rb"PK\x03\x04.{26}[^\x00]{1,255}?\.npy": Content("an archive of NumPy arrays", _TO_TOKENS),
    rb"PK\x03\x04.{26}[^\x00]{1,255}?/data\.pkl": Content("a file of torch.save", _TO_RECORDS),
    rb"PK\x03\x04": Content("a zip archive", "unpack it with `unzip {shell}`"),
    rb".{257}ustar": TAR_ARCHIVE,
    rb"PAR1": PARQUET_FILE,
    rb"ARROW1\x00\x00|\xff{4}.{2}[\x00-\x0f]\x00": Content(
        "an Arrow file",
        "convert it to Parquet, a directory of `save_to_disk` with "
        "`datasets.load_from_disk(DIRECTORY).to_parquet('train.parquet')`",
    ),
    rb"\x93NUMPY": Content("a NumPy array", _TO_TOKENS),
    rb"\x89HDF\r\n\x1a\n": Content("an HDF5 file", _TO_RECORDS),
    rb".{4}\x00{4}\{\s*\"": Content("a SafeTensors file", _TO_RECORDS),
    rb"\x80(?:[\x04\x05]\x95|[\x02\x03][(\]}cX])": Content("a pickle", _TO_RECORDS),
    rb"%PDF-": Content("a PDF file", "extract its text with `pdftotext {shell}`"),
    rb"\x88\xd8\x34\x01\x01\x00{3}": Content(
        "a token file of llm.c, which has a header",
        "remove the header with `tail -c +1025 {shell} > train.u16`",
    ),
    rb"\xa1\xd9\x34\x01\x07\x00{3}": Content(
        "a token file of llm.c, which has a header",
        "remove the header with `tail -c +1025 {shell} > train.u32`",
    ),
    rb"MMIDIDX\x00\x00": Content(
        "the index of a Megatron dataset",
        "its *.bin has the tokens, which *.u16 or *.u32 and tokens.json make readable",
    ),
}
_FORMATS = [(re.compile(magic, re.DOTALL), content) for magic, content in _MAGIC.items()]
TEXT = Content("text", "tokenize it with `hvdtrain data tokenize --input {shell} --out DIRECTORY`")
_UTF_16 = Content("UTF-16 text", "convert it with `iconv -f UTF-16 -t UTF-8 {shell}`")
_BINARY = Content(
    "not text, because it has NUL bytes",
    "name the text alone, such as with '**/*.txt'; token files are read with data.source tokens",
)


def format_of(head: bytes) -> Content | None:
    """The format whose magic bytes a file begins with; None: no known one.

    Args:
        head: the file's first HEAD_BYTES, or all if it is shorter.
    """
    return next((content for magic, content in _FORMATS if magic.match(head)), None)


def is_text(head: bytes) -> bool:
    """Whether a file begins as UTF-8 text that is long enough to be no coincidence."""
    characters = head.decode("utf-8", "ignore").encode()
    return (
        len(head) >= _SHORTEST_TEXT
        and len(head) - len(characters) < _MOST_BYTES
        and re.fullmatch(rb"[\t\n\r\x20-\xff]*", head) is not None
    )


def refusal(key: str, path: DataFile, content: Content) -> UserError:
    """The error for a file that is not what it would be read as.

    Args:
        key: the configuration key that names the file; empty: no key is known.
    """
    return UserError(f"{key}{': ' if key else ''}{path} is {_filled(content, path)}")


def described(path: DataFile, expected: Content | None = None) -> str:
    """What a file is and how it can be read, after "FILE is", for messages about unreadable files.

    Empty if its format is unknown, or the expected one.
    """
    try:
        content = format_of(beginning(path, HEAD_BYTES))
    except UserError:
        return ""
    return _filled(content, path) if content and content is not expected else ""


def check_text(key: str, files: Sequence[DataFile]) -> None:
    """Check that files, which are read as text, begin as text.

    Raises:
        UserError: a file is not text, or cannot be read.
    """
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        for path, content in zip(files, pool.map(_other_than_text, files), strict=True):
            if content is not None:
                raise refusal(key, path, content)


def _other_than_text(path: DataFile) -> Content | None:
    head = beginning(path, HEAD_BYTES)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _UTF_16
    return format_of(head) or (_BINARY if b"\0" in head else None)


def _filled(content: Content, path: DataFile) -> str:
    file = path.name if isinstance(path, RemoteFile) else str(path)
    advice = content.advice.format(shell=shlex.quote(file), python=repr(file))
    return f"{content.what}: {advice}"
