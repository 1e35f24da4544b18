"""Rows of a table, encoded for a model: codes, and the fraction between two edges.

Each column has its own codes: one for a missing cell, one for a category outside the vocabulary,
one for a cell hidden from the model, then its categories or edges. A number between two edges has
the lower edge's code; its fraction is the relative position between the two edges.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.data.tables import Cells, Table, read_cells, read_order
from hvdtrain.data.tables_columns import Column, Columns, Wanted, training_rows
from hvdtrain.data.tables_files import places_of, to_numpy
from hvdtrain.errors import UserError

MISSING, UNSEEN, HIDDEN = 0, 1, 2
SPECIAL = 3  # number of codes before a column's categories or edges


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
            f"{where}: {label.name} is {foreign}, which is none of the classes of the training "
            f"data ({shown})"
        )
    return np.asarray(to_numpy(numbers.cast("float64"), np.nan), dtype=np.float64)
