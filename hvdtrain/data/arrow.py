"""Rows of Arrow files, such as those of `save_to_disk` of the library `datasets` (extra `parquet`).

Files are Arrow streams or Arrow files (*.arrow). They are memory-mapped, unless compressed.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from hvdtrain.data.file_kinds import ARROW_FILE, described
from hvdtrain.data.files import Fingerprint, find_files, of_files
from hvdtrain.data.index import Format
from hvdtrain.data.order import Indices
from hvdtrain.data.remote import ByteRanges, DataFile, RemoteFile, read_url
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.untrusted import parse_json

if TYPE_CHECKING:
    import pyarrow as pa

_FILE_MAGIC = b"ARROW1"
_LARGE_BYTES = 1 << 26
_STATE, _SPLITS = "state.json", "dataset_dict.json"


class ArrowRows(Dataset[dict[str, Any]]):
    """A sample is a row: {column: value}.

    Args:
        patterns: files (*.arrow), directories or globs, all with the same columns. Of a directory
            of `save_to_disk` only the files of the dataset are read.
        columns: which to read; None = all.
        key: what the patterns come from, for messages.

    Attributes:
        shard_samples: number of rows of each file, int64, in the order of the samples.

    Raises:
        UserError: pyarrow is missing, or a file is broken or lacks a column.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        columns: Sequence[str] | None = None,
        key: str = "ArrowRows",
    ) -> None:
        self._paths = arrow_files(key, patterns)
        self._columns = None if columns is None else list(columns)
        for path in self._paths:
            if isinstance(path, RemoteFile):
                raise UserError(f"{key}: {path}: rows of Arrow files are read from local files")
        # The columns of each batch.
        self._columns_of: list[list[tuple[str, pa.Array]]] = []
        self._starts = [0]  # rows before each batch, and all rows
        self._checked = set[int]()  # batches
        self._open()

    def _open(self) -> None:
        counts = []
        for path in self._paths:
            counts.append(0)
            before = _allocated()
            for batch in batches(path, self._columns):
                names = batch.schema.names
                self._columns_of.append([*zip(names, batch.columns, strict=True)])
                self._starts.append(self._starts[-1] + len(batch))
                counts[-1] += len(batch)
            if (size := _allocated() - before) > _LARGE_BYTES:
                logger.warning(
                    "%s is compressed: each process keeps its rows in memory (%d MB)",
                    path,
                    size >> 20,
                )
        self.shard_samples = np.array(counts, dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        # Pickled, the batches would be copied.
        return {**self.__dict__, "_columns_of": [], "_starts": [0], "_checked": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        batch = bisect_right(self._starts, index) - 1
        row = index - self._starts[batch]
        if batch not in self._checked:
            for _, values in self._columns_of[batch]:
                check_values(values, self.where(index))
            self._checked.add(batch)
        return {name: values[row].as_py() for name, values in self._columns_of[batch]}

    def where(self, index: int) -> str:
        """Location such as "data.arrow: row 7", for messages."""
        ends = np.cumsum(self.shard_samples)
        file = int(np.searchsorted(ends, index, side="right"))
        before = int(ends[file - 1]) if file else 0
        return f"{self._paths[file]}: row {index - before + 1}"

    def fingerprint(self) -> Fingerprint:
        """16 hex digits that change with the files' names, numbers of rows, or content."""
        return of_files(self._paths, self.shard_samples.tolist())


def check_values(values: pa.Array, where: str) -> None:
    """Raise UserError if the content of an array is damaged, which would end the process."""
    import pyarrow as pa

    try:
        values.validate(full=True)
    except pa.ArrowInvalid as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{where} is damaged ({reason}): write it again") from None


# Columns of tokens by their usual names; else the only column of lists of integers.
_TOKEN_COLUMNS = ("input_ids", "tokens")


def token_lists(key: str, path: DataFile) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield (tokens of a batch, one row after the other; int64 length of each row).

    The tokens of a file that is not compressed are mapped.

    Args:
        key: names the file, for messages.

    Raises:
        UserError: the file is broken, or has no column of tokens, or null in it.
    """
    column = ""
    for batch in batches(path):
        column = column or _token_column(key, path, batch.schema)
        lists = batch.column(column)
        check_values(lists, f"{key}: {path}: {column}")
        if lists.null_count or lists.flatten().null_count:
            raise UserError(f"{key}: {path}: {column} has null: remove such rows")
        lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
        yield lists.flatten().to_numpy(zero_copy_only=False), lengths


def _token_column(key: str, path: DataFile, schema: pa.Schema) -> str:
    import pyarrow as pa

    lists = [pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list]
    found = [
        field.name
        for field in schema
        if any(is_list(field.type) for is_list in lists)
        and pa.types.is_integer(field.type.value_type)
    ]
    usual = [name for name in _TOKEN_COLUMNS if name in found]
    if not usual and len(found) != 1:
        raise UserError(
            f"{key}: {path} has no column {' or '.join(_TOKEN_COLUMNS)} with lists of integers, "
            f"only {', '.join(schema.names)}"
        )
    return usual[0] if usual else found[0]


def _allocated() -> int:
    """Bytes that Arrow has allocated; it maps what is not compressed."""
    try:
        import pyarrow as pa
    except ImportError:
        return 0  # `batches` says so
    return int(pa.total_allocated_bytes())


def arrow_files(key: str, patterns: Sequence[str]) -> list[DataFile]:
    """The Arrow files that patterns name; of a directory of `save_to_disk` those of its dataset.

    Such a directory may also have files that `datasets` has stored there later: results of `map`.

    Raises:
        UserError: no file, or the files of several splits.
    """
    return of_datasets(key, find_files(key, patterns, ARROW.suffixes, ARROW.name))


def of_datasets(key: str, files: Sequence[DataFile]) -> list[DataFile]:
    """Drop files that are not of the dataset in their directory, see `arrow_files`.

    Raises:
        UserError: the files of several splits, or a file of a dataset is missing.
    """
    directories = {os.path.dirname(str(file)): file for file in files}
    listed = {}
    for directory, file in directories.items():
        if (state := _json_next_to(file, _STATE)) is None:
            continue
        with suppress(KeyError, TypeError):
            listed[directory] = {each["filename"] for each in state["_data_files"]}
        for name in sorted(listed.get(directory, ())):
            if isinstance(file, Path) and not file.with_name(name).exists():
                raise UserError(f"{key}: {directory}: {name} of {_STATE} is missing: copy it again")
    splits: dict[str, list[str]] = {}
    for directory in sorted(listed):
        splits.setdefault(os.path.dirname(directory), []).append(directory)
    for above, below in splits.items():
        if len(below) > 1 and _json_next_to(directories[below[0]], f"../{_SPLITS}") is not None:
            names = ", ".join(map(os.path.basename, below))
            raise UserError(
                f"{key}: {above or '.'} has the splits {names}: name one, such as {below[-1]}"
            )
    found = [
        file
        for file in files
        if (directory := os.path.dirname(str(file))) not in listed or file.name in listed[directory]
    ]
    if files and not found:
        raise UserError(f"{key}: {', '.join(listed)}: {_STATE} lists none of the files there")
    return found


def _json_next_to(file: DataFile, name: str) -> Any:
    """The JSON file with this name in a file's directory, or above it; None: there is none."""
    with suppress(OSError, ValueError, UserError):
        if isinstance(file, RemoteFile):
            directory = file.url.rpartition("/")[0]
            if name.startswith("../"):
                directory, name = directory.rpartition("/")[0], name.removeprefix("../")
            return parse_json(read_url(f"{directory}/{name}"))
        return parse_json((file.parent / name).read_bytes())
    return None


def batches(
    path: DataFile, columns: Sequence[str] | None = None, ranges: ByteRanges | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a file.

    Args:
        columns: which to read, such as text or doc.body, a field of a struct; None = all.
        ranges: reads a remote file.

    Raises:
        UserError: pyarrow is missing, or the file is broken or lacks a column.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise UserError("Arrow files need pyarrow: pip install 'hvdtrain[parquet]'") from None
    try:
        if isinstance(path, RemoteFile):
            source = pa.PythonFile((ranges or ByteRanges()).source(path), mode="r")
        else:
            source = pa.memory_map(str(path))
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        names = reader.schema.names
        chosen = None
        if columns is not None:
            outer = [name if name in names else name.partition(".")[0] for name in columns]
            if missing := [name for name in outer if name not in names]:
                raise UserError(f"{path} has no column {missing[0]!r}, but {', '.join(names)}")
            chosen = [*dict.fromkeys(outer)]
        found = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in found:
            yield batch if chosen is None else batch.select(chosen)
    except (pa.ArrowException, OSError) as error:
        if content := described(path, ARROW_FILE):
            raise UserError(f"{path} is {content}") from None
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise UserError(f"{path} is not a complete Arrow file ({reason}): copy it again") from None


def _rows_before(path: DataFile, start: int, stop: int) -> Indices:
    return np.cumsum([0, *map(len, batches(path))], dtype=np.int64)


ARROW = Format("file of Arrow rows", (".arrow",), _rows_before)
