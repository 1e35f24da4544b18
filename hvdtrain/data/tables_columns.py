"""Column statistics that a model needs: edges of numbers, vocabularies.

One pass over the training rows, shared among any number of ranks. The ranks' results are combined
exactly (counts, exactly rounded sums, samples whose rows do not depend on which rank read them), so
the result is bitwise identical for any world size.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.tables import Cells, Kind, Table, cell_names, read_cells, read_order
from hvdtrain.data.tables_files import places_of
from hvdtrain.data.tables_sample import Sample
from hvdtrain.errors import UserError
from hvdtrain.runtime.mpi import RankGroup, on_all_ranks

# Numbers are embedded between at most this many quantiles.
_EDGES = 64
# Rarer categories count as unseen: their embedding is learned for the use on new categories.
_RARE = 10
_MOST_CATEGORIES = 1_000_000


@dataclass(frozen=True)
class Column:
    """Statistics of a column over the training rows.

    Args:
        name: for a part of a date, COLUMN.PART.
        kind: number or category.
        rows, missing: number of cells, and number of empty cells.
        mean, deviation, smallest, largest: of a number.
        edges: of a number: ascending, distinct; quantiles, or all values if there are few.
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
        features: of the columns that vary between rows.
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
                    f"{table.parts[number].file}: a row has no {name}, by which rows are split "
                    "(tabular.split_by)"
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
                f"column {name} has over {_MOST_CATEGORIES:,} categories: leave it out with "
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
    """Up to 64 distinct values of the sample, with about equally many rows between neighbours."""
    known = np.sort(values[~np.isnan(values)])
    places = np.linspace(0, len(known) - 1, _EDGES).round().astype(np.int64)
    return np.unique(known[places])
