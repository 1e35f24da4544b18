"""Tables of numbers, categories and dates, read in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.tables_files import (
    Part,
    import_pyarrow,
    open_csv,
    open_parquet,
    problems_of,
    to_numpy,
)
from hvdtrain.errors import UserError

Kind = Literal["number", "category", "date"]
_DATE_PARTS = ("year", "month", "day", "weekday")
_TIME_PARTS = ("hour", "minute")
_FUNCTIONS = {"weekday": "day_of_week"}  # pyarrow's names, if different


@dataclass(frozen=True)
class Table:
    """All files of a dataset.

    Args:
        key: the configuration key that names it, for messages.
        kinds: of each column, in the first file's order.
        timed: whether a date column includes a time of day.
    """

    key: str
    parts: list[Part]
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


def open_table(key: str, files: Sequence[Path], categories: Sequence[str]) -> Table:
    """Find the parts and columns of files that have the same columns.

    Args:
        categories: columns to treat as categories although their values are numbers.

    Raises:
        UserError: a file is incomplete, or its columns differ from the first file's.
    """
    import_pyarrow()
    first: dict[str, Any] = {}
    parts: list[Part] = []
    for file in files:
        if file.suffix == ".parquet":
            types, own = open_parquet(file)
        else:
            types, own = open_csv(file, first, categories)
        _check_columns(key, file, types, files[0], first or types)
        first = first or types
        parts += own
    return table_of(key, parts, first, categories)


def table_of(
    key: str, parts: list[Part], types: dict[str, Any], categories: Sequence[str]
) -> Table:
    """A table whose columns have these Arrow types."""
    pa = import_pyarrow()
    kinds = {name: _kind(key, name, kind, categories) for name, kind in types.items()}
    timed = {n: not pa.types.is_date(types[n]) for n, kind in kinds.items() if kind == "date"}
    return Table(key, parts, kinds, timed)


def read_cells(table: Table, part: Part, names: Sequence[str]) -> Cells:
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


def read_order(table: Table, part: Part, name: str) -> NDArray[np.float64]:
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
        f"{key}: column {name} is {arrow_type}: numbers, text, true and false, and dates are used; "
        "leave it out with tabular.ignore"
    )


def _check_columns(
    key: str, file: Path, types: dict[str, Any], first_file: Path, first: dict[str, Any]
) -> None:
    for name in sorted(types.keys() ^ first.keys()):
        here, there = (file, first_file) if name in types else (first_file, file)
        raise UserError(f"{key}: column {name!r} is in {here}, but not in {there}")
