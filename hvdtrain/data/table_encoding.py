"""Encoding of a table's rows for a model: statistics of the columns, codes and fractions of cells.

Statistics (edges of numbers, vocabularies of categories) come from one pass over the training
rows, shared among any number of ranks. The ranks' results are combined exactly (counts, exactly
rounded sums, samples whose rows do not depend on which rank read them), so the statistics are
bitwise identical for any world size.

Each column has its own codes: one for a missing cell, one for a category outside the vocabulary,
one for a cell hidden from the model, then its categories or edges. A number between two edges has
the lower edge's code; its fraction is the relative position between the two edges.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.data.order import splitmix64
from hvdtrain.data.tables import (
    Cells,
    Kind,
    Table,
    cell_names,
    places_of,
    read_cells,
    read_order,
    to_numpy,
)
from hvdtrain.errors import UserError
from hvdtrain.runtime.mpi import RankGroup, on_all_ranks

MISSING, UNSEEN, HIDDEN = 0, 1, 2
SPECIAL = 3  # number of codes before a column's categories or edges
# Numbers are embedded between at most this many quantiles.
_EDGES = 64
# Rarer categories count as unseen: their embedding is learned for the use on new categories.
_RARE = 10
_MOST_CATEGORIES = 1_000_000
_SAMPLE_ROWS = 1 << 14


@dataclass(frozen=True)
class Column:
    """Statistics of a column over the training rows.

    Args:
        name: for a part of a date, COLUMN.PART.
        kind: number or category.
        rows, missing: number of cells, and number of empty cells.
        mean, deviation, smallest, largest: for numbers.
        edges: for numbers: ascending, distinct; quantiles, or all values if there are few.
        categories: the most frequent one first.
        rare: number of further categories that are too rare.
    """

    name: str
    kind: Kind
    rows: int
    missing: int
    mean: float = 0.0
    deviation: float = 0.0
    smallest: float = 0.0
    largest: float = 0.0
    edges: list[float] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    rare: int = 0

    @property
    def constant(self) -> bool:
        """Whether the column is the same in all rows."""
        values = len(self.edges) + len(self.categories) + (self.rare > 0) + (self.missing > 0)
        return values < 2


@dataclass(frozen=True)
class Wanted:
    """Selection of columns to read from a table.

    Args:
        features: columns that are known for each row.
        label: the column to predict; None if there is none.
        split_by: number or date column that selects the validation rows: those with the largest
            values; None if no rows are held out.
        held_out: approximate fraction of the rows for validation.
    """

    features: tuple[str, ...]
    label: str | None = None
    split_by: str | None = None
    held_out: float = 0.0


@dataclass(frozen=True)
class Columns:
    """Statistics of a table.

    Args:
        rows: number of rows that were read.
        features: statistics of the columns that vary between rows.
        constant: names of the other columns.
        label: None if nothing is predicted.
        cut: rows whose `split_by` is at least this are held out for validation; None: no rows are.
    """

    rows: int
    features: list[Column]
    constant: list[str]
    label: Column | None = None
    cut: float | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Columns:
        """Raise ValueError, KeyError or TypeError if the text has another format."""
        found = json.loads(text)
        features = [Column(**column) for column in found.pop("features")]
        label = found.pop("label")
        return cls(features=features, label=Column(**label) if label else None, **found)


def scan(table: Table, wanted: Wanted, ranks: RankGroup) -> Columns:
    """Read all training rows once (the column of `split_by` twice), each rank its own parts.

    Raises:
        UserError: on every rank, if any rank finds an error in its data.
    """
    cut = _cut(table, wanted, ranks) if wanted.split_by else None
    label = [wanted.label] if wanted.label else []
    names = [*wanted.features, *label]
    own = _Found(cell_names(table, names))

    def read_own() -> dict[str, Any]:
        for number in range(len(table.parts))[ranks.rank :: ranks.size] if names else ():
            part = table.parts[number]
            cells = read_cells(table, part, names)
            order = read_order(table, part, wanted.split_by) if wanted.split_by else None
            own.add(number, cells, training_rows(order, cut))
        return own.state()

    for rank, state in enumerate(on_all_ranks(ranks, read_own)):
        if rank != ranks.rank:
            own.merge(state)
    columns = own.columns(wanted.label)
    found = columns.pop() if wanted.label else None
    return Columns(
        own.rows,
        [column for column in columns if not column.constant],
        [column.name for column in columns if column.constant],
        found,
        cut,
    )


def training_rows(order: NDArray[np.float64] | None, cut: float | None) -> NDArray[np.bool_] | None:
    """Mask of the training rows; None: all rows."""
    return None if order is None or cut is None else order < cut


def _cut(table: Table, wanted: Wanted, ranks: RankGroup) -> float:
    """Split value: rows of equal value stay together, and neither side is empty."""
    assert wanted.split_by is not None
    name, own = wanted.split_by, Sample(1)

    def read_own() -> list[str]:
        for number in range(len(table.parts))[ranks.rank :: ranks.size]:
            order = read_order(table, table.parts[number], name)
            if np.isnan(order).any():
                raise UserError(
                    f"{table.parts[number].file}: a row has no {name}, the column of "
                    "tabular.split_by"
                )
            own.add(number, np.arange(len(order)), order[:, None])
        return own.state()

    for rank, state in enumerate(on_all_ranks(ranks, read_own)):
        if rank != ranks.rank:
            own.merge(state)
    values = np.sort(own.values[:, 0])
    if len(values) == 0 or values[0] == values[-1]:
        raise UserError(f"tabular.split_by: all rows have the same {name}: nothing to split by")
    cut = float(values[int(len(values) * (1 - wanted.held_out))])
    return cut if cut > values[0] else float(values[values > values[0]][0])


class _Found:
    """Statistics of the parts read so far."""

    def __init__(self, cells: Sequence[tuple[str, Kind]]) -> None:
        self.rows = 0
        self._order = [name for name, _ in cells]
        self._numbers = [name for name, kind in cells if kind == "number"]
        self._counts: dict[str, Counter[str]] = {
            name: Counter() for name, kind in cells if kind == "category"
        }
        self._missing: Counter[str] = Counter()
        # Per part: sum and sum of squares; smallest and largest value.
        self._sums: dict[str, list[list[float]]] = {name: [] for name in self._numbers}
        self._ends: dict[str, list[float]] = {name: [] for name in self._numbers}
        self._sample = Sample(len(self._numbers))

    def add(self, part: int, cells: Cells, chosen: NDArray[np.bool_] | None) -> None:
        """Args: chosen: mask of the rows to include; None: all."""
        length = len(next(iter([*cells.numbers.values(), *cells.categories.values()])))
        places = np.arange(length) if chosen is None else np.flatnonzero(chosen)
        self.rows += len(places)
        numbers = {name: cells.numbers[name][places] for name in self._numbers}
        if self._numbers:
            self._sample.add(part, places, np.stack([*numbers.values()], axis=1))
        for name, values in numbers.items():
            known = values[~np.isnan(values)]
            self._missing[name] += len(values) - len(known)
            if len(known):
                self._sums[name].append([float(known.sum()), float(np.square(known).sum())])
                self._ends[name] += [float(known.min()), float(known.max())]
        for name, texts in cells.categories.items():
            self._count(name, texts if chosen is None else texts.take(places_of(chosen)))

    def _count(self, name: str, texts: Any) -> None:
        import pyarrow.compute as pc

        self._missing[name] += texts.null_count
        found = pc.value_counts(texts.drop_null())
        self._counts[name].update(
            dict(zip(found.field(0).to_pylist(), found.field(1).to_pylist(), strict=True))
        )
        if len(self._counts[name]) > _MOST_CATEGORIES:
            raise UserError(
                f"column {name} has over {_MOST_CATEGORIES:,} categories: omit it with "
                "tabular.ignore"
            )

    def state(self) -> dict[str, Any]:
        """State for `merge` on another rank; JSON-serializable."""
        return {
            "rows": self.rows,
            "missing": self._missing,
            "counts": self._counts,
            "sums": self._sums,
            "ends": self._ends,
            "sample": self._sample.state(),
        }

    def merge(self, state: dict[str, Any]) -> None:
        self.rows += state["rows"]
        self._missing.update(state["missing"])
        for name, counts in state["counts"].items():
            self._counts[name].update(counts)
        for name in self._numbers:
            self._sums[name] += state["sums"][name]
            self._ends[name] += state["ends"][name]
        self._sample.merge(state["sample"])

    def columns(self, label: str | None) -> list[Column]:
        """Args: label: its categories are never treated as rare."""
        return [
            self._category(name, 1 if name == label else _RARE)
            if name in self._counts
            else self._number(name)
            for name in self._order
        ]

    def _category(self, name: str, fewest: int) -> Column:
        counts = self._counts[name]
        common = [text for text, count in counts.items() if count >= fewest]
        common.sort(key=lambda text: (-counts[text], text))
        rare = len(counts) - len(common)
        return Column(
            name, "category", self.rows, self._missing[name], categories=common, rare=rare
        )

    def _number(self, name: str) -> Column:
        missing = self._missing[name]
        if missing == self.rows:
            return Column(name, "number", self.rows, missing)
        # math.fsum rounds once: the result does not depend on the order of the parts.
        total, squares = (math.fsum(sums) for sums in zip(*self._sums[name], strict=True))
        count = self.rows - missing
        mean = total / count
        values = self._sample.values[:, self._numbers.index(name)]
        values = np.unique(values[~np.isnan(values)])
        if len(values) > _EDGES:
            values = _quantiles(self._sample.values[:, self._numbers.index(name)])
        return Column(
            name, "number", self.rows, missing, mean, math.sqrt(max(squares / count - mean**2, 0)),
            min(self._ends[name]), max(self._ends[name]), edges=values.tolist(),
        )  # fmt: skip


def _quantiles(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Up to 64 distinct values of the sample, with about equally many rows between neighbors."""
    known = np.sort(values[~np.isnan(values)])
    places = np.linspace(0, len(known) - 1, _EDGES).round().astype(np.int64)
    return np.unique(known[places])


# --- a random sample of rows --------------------------------------------------


class Sample:
    """The rows with the smallest keys; a key is a hash of the row's place in the table.

    Samples of parts of a table can be merged in any order (a bottom-k sketch: Cohen and Kaplan,
    "Summarizing data using bottom-k sketches", 2007). A table of at most 16,384 rows is included
    completely.

    Attributes:
        values: (rows, width) float64, in the order of the keys; NaN if missing.
    """

    def __init__(self, width: int) -> None:
        self.values = np.empty((0, width))
        self._keys = np.empty(0, np.uint64)

    def add(self, part: int, rows: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Add rows of a part.

        Args:
            part: its number in the table.
            rows: their numbers in the part.
            values: (len(rows), width).
        """
        places = np.uint64(part << 32) + rows.astype(np.uint64)
        self._keep(splitmix64(places), values)

    def state(self) -> list[str]:
        """State for `merge` on another rank; JSON-serializable."""
        return [base64.b64encode(array.tobytes()).decode() for array in (self._keys, self.values)]

    def merge(self, state: list[str]) -> None:
        keys = np.frombuffer(base64.b64decode(state[0]), np.uint64)
        values = np.frombuffer(base64.b64decode(state[1]))
        self._keep(keys, values.reshape(len(keys), self.values.shape[1]))

    def _keep(self, keys: NDArray[np.uint64], values: NDArray[np.float64]) -> None:
        if len(self._keys) == _SAMPLE_ROWS:
            smaller = keys < self._keys[-1]
            keys, values = keys[smaller], values[smaller]
        keys = np.concatenate((self._keys, keys))
        kept = np.argsort(keys, kind="stable")[:_SAMPLE_ROWS]
        self._keys = keys[kept]
        self.values = np.concatenate((self.values, values))[kept]


# --- encoded rows -------------------------------------------------------------


class Rows(NamedTuple):
    """Encoded rows.

    Args:
        codes: (N, columns) int32, all columns in one range, see `offsets`.
        fractions: (N, columns) float32 in [0, 1].
        labels: (N,) float64: the class number, or the number itself; NaN if missing.
    """

    codes: Tensor
    fractions: Tensor
    labels: Tensor

    def fingerprint(self) -> bytes:
        """Hash of the content."""
        digest = hashlib.sha256()
        for tensor in self:
            digest.update(tensor.contiguous().numpy().data)
        return digest.digest()

    def take(self, rows: Tensor) -> Rows:
        """Args: rows: indices or a mask."""
        return Rows(*(tensor[rows] for tensor in self))


class Read(NamedTuple):
    """Encoded content of a table.

    Args:
        train, held_out: rows before the cut, and from the cut on; without a cut all are in `train`.
        unseen: for each of the two, cells per column with a category outside the vocabulary.
    """

    train: Rows
    held_out: Rows
    unseen: tuple[Counter[str], Counter[str]]


def sizes(columns: Sequence[Column]) -> list[int]:
    """Number of codes of each column."""
    return [SPECIAL + len(column.edges) + len(column.categories) for column in columns]


def offsets(columns: Sequence[Column]) -> list[int]:
    """The first code of each column."""
    return [0, *accumulate(sizes(columns))][:-1]


def classes(label: Column) -> list[str]:
    """Classes of a predicted category, in numeric order if all are numbers, else sorted as text."""
    try:
        return sorted(label.categories, key=float)
    except ValueError:
        return sorted(label.categories)


def read_rows(table: Table, wanted: Wanted, columns: Columns, cut: float | None) -> Read:
    """Encode all rows.

    Args:
        cut: value of `wanted.split_by`; None: no split.

    Raises:
        UserError: a label is not one of the classes, or a part of the table cannot be read.
    """
    names = [*wanted.features, *([wanted.label] if wanted.label else [])]
    unseen: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    pieces: list[list[Rows]] = [[_nothing(columns)], [_nothing(columns)]]
    for part in table.parts:
        cells = read_cells(table, part, names)
        order = read_order(table, part, wanted.split_by or "") if cut is not None else None
        labels = _labels(cells, columns, f"{table.key}: {part.file}")
        first = training_rows(order, cut)
        every = first if first is not None else np.ones(len(labels), bool)
        for side, chosen in enumerate((every, ~every)):
            codes, fractions = encode(columns.features, cells, chosen, unseen[side])
            rows = (torch.from_numpy(array) for array in (codes, fractions, labels[chosen]))
            pieces[side].append(Rows(*rows))
    both = (Rows(*map(torch.cat, zip(*side, strict=True))) for side in pieces)
    return Read(next(both), next(both), unseen)


def _nothing(columns: Columns) -> Rows:
    codes = torch.empty(0, len(columns.features), dtype=torch.int32)
    return Rows(codes, codes.float(), torch.empty(0, dtype=torch.float64))


def encode(
    columns: Sequence[Column], cells: Cells, chosen: NDArray[np.bool_], unseen: Counter[str]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Codes and fractions of the chosen rows, (N, columns) each.

    Args:
        unseen: incremented by the number of cells with a category outside the vocabulary.
    """
    codes = np.zeros((int(chosen.sum()), len(columns)), np.int32)
    fractions = np.zeros(codes.shape, np.float32)
    for place, (column, offset) in enumerate(zip(columns, offsets(columns), strict=True)):
        if column.kind == "category":
            found = _categories(column, cells.categories[column.name], chosen)
            unseen[column.name] += int((found == UNSEEN).sum())
        else:
            found, fractions[:, place] = _numbers(column, cells.numbers[column.name][chosen])
        codes[:, place] = offset + found
    return codes, fractions


def _categories(column: Column, texts: Any, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = texts.take(places_of(chosen))
    known = pc.index_in(texts, value_set=pa.array(column.categories, "string"))
    codes = to_numpy(known, UNSEEN - SPECIAL).astype(np.int64) + SPECIAL
    return np.where(to_numpy(texts.is_null().cast("int8"), 0) == 1, MISSING, codes)


def _numbers(
    column: Column, values: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Encode numbers; values beyond the first or last edge are clamped to it."""
    edges = np.asarray(column.edges)
    lower = np.searchsorted(edges, values, side="right") - 1
    lower = np.clip(lower, 0, max(len(edges) - 2, 0))
    upper = np.minimum(lower + 1, len(edges) - 1)
    width = np.where(upper > lower, edges[upper] - edges[lower], 1.0)
    missing = np.isnan(values)
    fractions = np.clip((np.where(missing, 0.0, values) - edges[lower]) / width, 0.0, 1.0)
    return np.where(missing, MISSING, SPECIAL + lower), np.where(missing, 0.0, fractions)


def _labels(cells: Cells, columns: Columns, where: str) -> NDArray[np.float64]:
    label = columns.label
    if label is None:
        some = next(iter([*cells.numbers.values(), *cells.categories.values()]))
        return np.full(len(some), np.nan)
    if label.kind == "number":
        return cells.numbers[label.name]
    import pyarrow as pa
    import pyarrow.compute as pc

    texts, known = cells.categories[label.name], classes(label)
    numbers = pc.index_in(texts, value_set=pa.array(known, "string"))
    if numbers.null_count > texts.null_count:
        foreign = texts.filter(pc.and_(numbers.is_null(), texts.is_valid()))[0]
        shown = ", ".join(known[:10]) + (", ..." if len(known) > 10 else "")
        raise UserError(
            f"{where}: {label.name} is {foreign}, which is not one of the classes of the training "
            f"data ({shown})"
        )
    return np.asarray(to_numpy(numbers.cast("float64"), np.nan), dtype=np.float64)
