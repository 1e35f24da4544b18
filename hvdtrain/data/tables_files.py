"""CSV and Parquet files, read in parts: a byte range of a CSV file, a row group of a Parquet file.

Parts depend only on the files, so any number of ranks can share them. Each line of a CSV file is a
row: line breaks within quotes are not supported.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UserError

SUFFIXES = (".csv", ".parquet")
# Part size of a CSV file: large enough that parsing takes longer than the request.
_PART_BYTES = 2 << 20


def to_numpy(array: Any, missing: float) -> NDArray[Any]:
    """Convert a pyarrow.Array of numbers; nulls become `missing`.

    pyarrow's conversion would import pandas if installed, which takes 0.3 s on each rank.
    """
    values = _buffer(array)
    if array.null_count == 0:
        return values
    return np.where(_buffer(array.is_valid().cast("int8")) == 1, values, missing)


def _buffer(array: Any) -> NDArray[Any]:
    dtype = np.dtype(array.type.to_pandas_dtype())
    if len(array) == 0:
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype)[array.offset : array.offset + len(array)]


def places_of(chosen: NDArray[np.bool_]) -> Any:
    """Indices of the chosen rows, for pyarrow.Array.take."""
    pa = import_pyarrow()
    places = np.flatnonzero(chosen).astype(np.int64)
    return pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places)])


class Part(NamedTuple):
    """A part of a table.

    `read(columns)` returns a pyarrow.Table of these columns, with the types of the file.
    """

    file: str
    read: Callable[[Sequence[str]], Any]


def import_pyarrow() -> Any:
    """Return the package pyarrow.

    Raises:
        UserError: it is missing.
    """
    try:
        import pyarrow
        import pyarrow.compute
    except ModuleNotFoundError:
        raise UserError(
            "task tabular: reading tables takes pyarrow: pip install 'hvdtrain[tabular]'"
        ) from None
    return pyarrow


# --- Parquet ------------------------------------------------------------------


def open_parquet(file: Path) -> tuple[dict[str, Any], list[Part]]:
    import pyarrow.parquet as pq

    with problems_of(str(file)), pq.ParquetFile(file) as opened:
        types = {column.name: column.type for column in opened.schema_arrow}
        groups = opened.num_row_groups
    return types, [Part(str(file), _reader(file, group)) for group in range(groups)]


def _reader(file: Path, group: int) -> Callable[[Sequence[str]], Any]:
    def read(columns: Sequence[str]) -> Any:
        import pyarrow.parquet as pq

        with problems_of(str(file)), pq.ParquetFile(file) as opened:
            return opened.read_row_group(group, [*columns], use_threads=False)

    return read


# --- CSV ----------------------------------------------------------------------


def open_csv(
    file: Path, first: dict[str, Any], categories: Sequence[str]
) -> tuple[dict[str, Any], list[Part]]:
    """Open a CSV file; columns get the types that they have in the first file."""
    with open(file, "rb") as opened:
        head = opened.readline()
        sample = opened.read(_PART_BYTES) + opened.readline()
    with problems_of(str(file)):
        names = _parsed(head, None, None).column_names
        if len(set(names)) < len(names):
            raise UserError(f"{file}: two columns have one name in its first line")
        looks = _parsed(sample, names, None).schema if sample else None
    types = {name: first.get(name) or _csv_type(name, looks, categories) for name in names}
    size = file.stat().st_size
    begins = [*range(len(head), size, _PART_BYTES)]
    ranges = zip(begins, [*begins[1:], size], strict=True)
    return types, [Part(str(file), _csv_reader(file, names, types, part)) for part in ranges]


def _csv_type(name: str, looks: Any, categories: Sequence[str]) -> Any:
    """Widen types: later rows may hold fractions after integers, or text after booleans."""
    pa = import_pyarrow()
    kind = looks.field(name).type if looks else pa.null()
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return kind
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return pa.float64() if number and name not in categories else pa.string()


def _csv_reader(
    file: Path, names: Sequence[str], types: dict[str, Any], part: tuple[int, int]
) -> Callable[[Sequence[str]], Any]:
    def read(columns: Sequence[str]) -> Any:
        with problems_of(str(file)):
            return _parsed(_lines(file, *part), names, {n: types[n] for n in columns})

    return read


def _lines(file: Path, begin: int, end: int) -> bytes:
    """The lines whose first byte is in [begin, end)."""
    with open(file, "rb") as opened:
        opened.seek(begin - 1)
        opened.readline()
        place = opened.tell()
        if place >= end:
            return b""
        lines = opened.read(end - place)
        return lines if lines.endswith(b"\n") else lines + opened.readline()


def _parsed(text: bytes, names: Sequence[str] | None, types: dict[str, Any] | None) -> Any:
    """Parse text to a pyarrow.Table.

    Args:
        names: of the columns; None: read from the first line.
        types: of the requested columns; None: all columns, with inferred types.
    """
    pa = import_pyarrow()
    from pyarrow import csv

    if types is not None and not text:
        return pa.table({name: pa.array([], kind) for name, kind in types.items()})
    return csv.read_csv(
        io.BytesIO(text),
        csv.ReadOptions(use_threads=False, column_names=names, block_size=max(len(text), 1) + 1),
        convert_options=csv.ConvertOptions(
            column_types=types,
            include_columns=[*types] if types else None,
            strings_can_be_null=True,
        ),
    )


@contextmanager
def problems_of(file: str, column: str = "") -> Iterator[None]:
    """Convert pyarrow's errors to a UserError of one sentence."""
    pa = import_pyarrow()
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())[:300]
        where = f"{file}, column {column}" if column else file
        raise UserError(f"{where}: cannot be read ({said}): repair or remove it") from None
