"""Rows of Parquet files (extra `parquet`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from hvdtrain.data.file_kinds import PARQUET_FILE, described
from hvdtrain.data.files import Fingerprint
from hvdtrain.data.index import Format
from hvdtrain.data.order import Indices
from hvdtrain.data.records import Files
from hvdtrain.data.remote import ByteRanges, DataFile
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

# Limit of the memory for decoded row groups, in each process.
_CACHE_BYTES = 1 << 28


class ParquetRows(Dataset[dict[str, Any]]):
    """A sample is a row: {column: value}.

    Rows are decoded by row group, and each process caches the most recently used row groups, up to
    256 MB. If the order jumps between more row groups than fit into the cache, each row costs the
    decoding of a row group. Write files for training with small row groups (some MB).

    Args:
        patterns: files (*.parquet), directories, globs or URLs, all with the same columns.
        columns: which to read, such as text or doc.body, a field of a struct; None = all.
        cache: directory for indexes, see records.Files.
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
        cache: str | None = None,
        key: str = "ParquetRows",
    ) -> None:
        self._files = Files(patterns, PARQUET, cache, key)
        self._columns = None if columns is None else list(columns)
        self.shard_samples = np.array([i[-1] for i in self._files.indexes], dtype=np.int64)
        self._starts = np.cumsum([0, *self.shard_samples])
        self._groups: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        for column in columns or ():
            check_column(self._files.paths[0], column, key)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        groups, row = self._files.indexes[file], index - int(self._starts[file])
        group = int(np.searchsorted(groups, row, side="right")) - 1
        table = self._table(file, group).slice(row - int(groups[group]), 1)
        return records_of(table, self._files.paths[file])[0]

    def where(self, index: int) -> str:
        """Location such as "0.parquet: row 7", for messages."""
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"{self._files.paths[file]}: row {index - int(self._starts[file]) + 1}"

    def fingerprint(self) -> Fingerprint:
        """16 hex digits that change with the files' names, numbers of rows, or content."""
        return self._files.fingerprint(self.shard_samples.tolist())

    def _table(self, file: int, group: int) -> pa.Table:
        found = self._groups.pop((file, group), None)
        if found is None:
            found = read_group(self._files.paths[file], group, self._columns, self._files.ranges)
            size = sum(table.nbytes for table in self._groups.values())
            while self._groups and size + found.nbytes > _CACHE_BYTES:
                size -= self._groups.popitem(last=False)[1].nbytes
        self._groups[file, group] = found  # most recently used last
        return found


def read_group(
    path: DataFile, group: int, columns: Sequence[str] | None, ranges: ByteRanges
) -> pa.Table:
    """Rows of a row group.

    Args:
        ranges: reads the file if it is remote.

    Raises:
        UserError: the file is broken, or lacks a column.
    """
    import pyarrow as pa

    try:
        with _opened(path, ranges) as file:
            # Arrow's threads would not survive the fork of a worker.
            found = file.read_row_group(group, columns=columns, use_threads=False)
            names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, error) from None
    for column in columns or ():
        if not {column, _outermost(column)} & {*found.column_names}:
            raise _without(path, column, names)
    return found


def records_of(rows: pa.Table, path: DataFile) -> list[dict[str, Any]]:
    """Rows as dicts; raise UserError if text is not valid."""
    try:
        found: list[dict[str, Any]] = rows.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} has text that is not UTF-8 ({error}): write it again") from None
    return found


def _outermost(column: str) -> str:
    """Name of the column that contains the field of a struct, such as doc for doc.body."""
    return column.partition(".")[0]


def _without(path: DataFile, column: str, names: Sequence[str]) -> UserError:
    return UserError(f"{path} has no column {column!r}, but {', '.join(names)}")


def row_groups(path: DataFile) -> Indices:
    """Number of rows before each row group, followed by the total.

    Raises:
        UserError: pyarrow is missing, or the file is broken.
    """
    with _opened(path, ByteRanges()) as file:
        counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    return np.cumsum([0, *counts], dtype=np.int64)


def check_column(path: DataFile, column: str, key: str) -> None:
    """Raise UserError if a file has no such column."""
    with _opened(path, ByteRanges()) as file:
        names = file.schema_arrow.names
    if not {column, _outermost(column)} & {*names}:
        raise UserError(f"{key}: {_without(path, column, names)}")


def _opened(path: DataFile, ranges: ByteRanges) -> Any:
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError("Parquet files need pyarrow: pip install 'hvdtrain[parquet]'") from None
    try:
        return ParquetFile(ranges.source(path))
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, error) from None


def _broken(path: DataFile, error: Exception) -> UserError:
    if content := described(path, PARQUET_FILE):
        return UserError(f"{path} is {content}")
    reason = " ".join(str(error).split()).partition(". ")[0]
    return UserError(f"{path} is not a complete Parquet file ({reason}): copy it again")


PARQUET = Format("Parquet file", (".parquet",), lambda path, start, stop: row_groups(path))
