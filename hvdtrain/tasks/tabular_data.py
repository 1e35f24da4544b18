"""Rows for training and validation of the task `tabular`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from hvdtrain.checkpoint.weights import read_weights
from hvdtrain.data.file_kinds import described
from hvdtrain.data.files import expand
from hvdtrain.data.order import permute
from hvdtrain.data.table_encoding import Column, Columns, Rows, Wanted, classes, read_rows, scan
from hvdtrain.data.tables import (
    DATE,
    DELAY,
    LATE,
    SUFFIXES,
    Borders,
    Table,
    cell_names,
    csv_borders,
    flights_table,
    open_table,
)
from hvdtrain.errors import UserError
from hvdtrain.runtime import collectives
from hvdtrain.runtime.init import is_initialized, own_position
from hvdtrain.runtime.mpi import Alone, RankGroup, on_all_ranks
from hvdtrain.tasks.tabular_config import TabularConfig, TabularTaskConfig

T = TypeVar("T")
COLUMNS_BUFFER, LABEL_BUFFER = "columns_json", "label_json"
_MOST_CLASSES = 1000
_SEED = 0  # the selection of rows depends on the data only, not on the run's seed


class RanksOfRun:
    """The ranks of a training run; in elastic training, each process prepares the data alone."""

    def __init__(self) -> None:
        place = own_position()
        self.rank, self.size = place.rank, place.world_size

    def run(self, part: Callable[[], T]) -> T:
        # Horovod would end a run whose other ranks wait in a gather for the largest file.
        return collectives.on_all_ranks("columns.part", part)

    def gather(self, value: Any) -> list[Any]:
        return collectives.gather_json(value, "columns")

    def abort(self) -> None:
        """No effect: the ranks of a run terminate each other by other means."""


@dataclass(frozen=True)
class TabularData:
    """Encoded rows.

    Args:
        notes: what was omitted, or does not fit.
    """

    train: Rows
    validation: Rows
    columns: Columns
    notes: list[str]


def load(config: TabularTaskConfig) -> TabularData:
    """Read the table: column statistics together with the other ranks, then all rows.

    Raises:
        UserError: the table is invalid; for data that is read in shares, on all ranks.
    """
    ranks: RankGroup = RanksOfRun() if is_initialized() else Alone()
    borders = share_borders(config, ranks)
    table, wanted = open_training(config, borders, ranks)
    own, files = config.tabular, config.data
    columns = scan_columns(own, table, wanted, ranks)
    _check_label(own, columns.label)
    wanted = replace(wanted, features=_sources(table, wanted, columns))
    read = read_rows(table, wanted, columns, columns.cut)
    held_out, unseen = read.held_out, read.unseen[1]
    if files.validation:
        other = _open("data.validation", files.validation, _texts(own), borders, table)
        again = read_rows(other, wanted, columns, None)
        held_out, unseen = again.train, again.unseen[0]
    notes = _notes(columns, (read.unseen[0], unseen))
    train = _labeled("training", read.train, columns.label, notes)
    validation = _labeled("validation", held_out, columns.label, notes)
    if own.label_fraction < 1:
        train = _some(train, max(1, round(len(train.labels) * own.label_fraction)))
        notes.append(
            f"tabular.label_fraction {own.label_fraction:g}: training uses "
            f"{len(train.labels):,} rows"
        )
    # Evaluation may use only the first rows, which must not all be of one day.
    return TabularData(train, _some(validation, len(validation.labels)), columns, notes)


def share_borders(config: TabularTaskConfig, ranks: RankGroup) -> Borders:
    """Borders of all CSV files, each read whole by one rank; every rank must call this.

    Raises:
        UserError: on every rank, if a file cannot be read on any rank.
    """
    named = {"data.train": config.data.train, "data.validation": config.data.validation}

    def read_own() -> Borders:
        found: Borders = {}
        for key, patterns in named.items():
            files = _files(key, patterns) if patterns else []
            found |= csv_borders(key, files[ranks.rank :: ranks.size])
        return found

    borders: Borders = {}
    for found in on_all_ranks(ranks, read_own):
        borders |= found
    return borders


def open_training(
    config: TabularTaskConfig, borders: Borders, ranks: RankGroup
) -> tuple[Table, Wanted]:
    """The table with the training rows, and the columns to read; every rank must call this.

    Raises:
        UserError: on every rank, if on any rank a configured column does not exist or a file
            cannot be read.
    """
    opened: list[tuple[Table, Wanted]] = []
    on_all_ranks(ranks, lambda: opened.append(_open_training(config, borders)))
    return opened[0]


def _open_training(task: TabularTaskConfig, borders: Borders) -> tuple[Table, Wanted]:
    config, files = task.tabular, task.data
    if files.train:
        table = _open("data.train", files.train, _texts(config), borders, None)
        label, split_by, left_out = config.label, config.split_by, {config.label}
    else:
        label = config.label or (DELAY if config.objective == "regression" else LATE)
        split_by, left_out = config.split_by or DATE, {label, LATE, DELAY}
        table = flights_table("data.train", ["flight", *_texts(config, label)])
    named = {"label": [label], "split_by": [split_by], "ignore": config.ignore}
    for key, names in {**named, "categories": config.categories}.items():
        for name in names:
            if name is not None and name not in table.kinds:
                raise UserError(
                    f"tabular.{key}: no column {name!r}; the columns are {', '.join(table.kinds)}"
                )
    if split_by is not None and table.kinds[split_by] == "category":
        raise UserError(f"tabular.split_by: column {split_by} is neither a number nor a date")
    if label and config.objective == "regression" and table.kinds[label] != "number":
        raise UserError(
            f"tabular.label: {label} is not a number; use tabular.objective classification"
        )
    features = tuple(n for n in table.kinds if n not in left_out and n not in config.ignore)
    if not features:
        raise UserError("tabular.ignore: no column remains")
    predicted = None if config.objective == "pretraining" else label
    return table, Wanted(features, predicted, split_by, files.validation_fraction)


def scan_columns(config: TabularConfig, table: Table, wanted: Wanted, ranks: RankGroup) -> Columns:
    """Statistics and vocabularies: as configured, or else from the training rows."""
    if config.columns is None:
        return scan(table, wanted, ranks)
    given = read_columns(Path(config.columns))
    found = scan(table, replace(wanted, features=()), ranks)
    label = found.label
    if given.label and label and (given.label.name, given.label.kind) == (label.name, label.kind):
        label = given.label
    return replace(given, label=label, cut=found.cut)


def read_columns(path: Path) -> Columns:
    """Read column statistics from a file of `hvdtrain data columns`, or from this task's weights.

    Raises:
        UserError: the path has none.
    """
    try:
        if path.suffix == ".json":
            return Columns.from_json(path.read_text())
        tensors = read_weights(path).tensors
        texts = [
            bytes(tensors[name].tolist()).decode() if name in tensors else "null"
            for name in (COLUMNS_BUFFER, LABEL_BUFFER)
        ]
        label = Columns.from_json(texts[1]).label if texts[1] != "null" else None
        return replace(Columns.from_json(texts[0]), label=label)
    except UserError as error:
        raise UserError(f"tabular.columns: {error}") from None
    except OSError as error:
        raise UserError(f"tabular.columns: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"tabular.columns: {path} has no columns: it is neither a file of `hvdtrain data "
            "columns` nor a run of the task tabular"
        ) from None


def buffers(columns: Columns) -> dict[str, torch.Tensor]:
    """Column statistics as buffers of the model, to save, load and export with it."""
    kept = {COLUMNS_BUFFER: replace(columns, label=None, cut=None)}
    if columns.label is not None:
        kept[LABEL_BUFFER] = Columns(columns.rows, [], [], columns.label)
    return {
        name: torch.frombuffer(bytearray(part.to_json().encode()), dtype=torch.uint8)
        for name, part in kept.items()
    }


def _texts(config: TabularConfig, label: str | None = None) -> list[str]:
    """Columns to treat as categories, whatever their values."""
    predicted = [label or config.label] if config.objective == "classification" else []
    return [*config.categories, *(name for name in predicted if name)]


def _open(
    key: str,
    patterns: Sequence[str],
    texts: Sequence[str],
    borders: Borders,
    first: Table | None,
) -> Table:
    table = open_table(key, _files(key, patterns), texts, borders)
    if first is not None:
        for name in first.kinds:
            if name not in table.kinds:
                raise UserError(f"{key}: column {name!r} of data.train is missing")
            if table.kinds[name] != first.kinds[name]:
                raise UserError(
                    f"{key}: column {name!r} is a {table.kinds[name]}, but a {first.kinds[name]} "
                    "in data.train"
                )
        for name in table.kinds.keys() - first.kinds.keys():
            raise UserError(f"{key}: column {name!r} is not in data.train")
    return table


def _files(key: str, patterns: Sequence[str]) -> list[Path]:
    files = expand(key, patterns)
    wrong = [file for file in files if file.suffix not in SUFFIXES]
    if wrong:
        content = described(wrong[0])
        raise UserError(
            f"{key}: {wrong[0]} is not a table (*{' or *'.join(SUFFIXES)})"
            + (f", but {content}" if content else "")
        )
    return files


def _sources(table: Table, wanted: Wanted, columns: Columns) -> tuple[str, ...]:
    """The table's columns from which the features are derived.

    Raises:
        UserError: the features belong to another table.
    """
    here = {
        cell: (kind, name) for name in wanted.features for cell, kind in cell_names(table, [name])
    }
    for column in columns.features:
        if column.name not in here:
            raise UserError(f"tabular.columns: column {column.name!r} is not in the data")
        if column.kind != here[column.name][0]:
            raise UserError(
                f"tabular.columns: column {column.name!r} is a {column.kind}, but a "
                f"{here[column.name][0]} in the data"
            )
    known = {column.name for column in columns.features}
    for cell, (_, name) in here.items():
        if cell not in known and cell not in columns.constant:
            raise UserError(
                f"tabular.columns: column {name!r} of the data is missing; omit it with "
                "tabular.ignore"
            )
    used = {here[name][1] for name in known}
    return tuple(name for name in wanted.features if name in used)


def _check_label(config: TabularConfig, label: Column | None) -> None:
    if label is None:
        return
    if label.missing == label.rows:
        raise UserError(f"tabular.label: no row has a {label.name}")
    if label.kind == "number":
        if label.smallest == label.largest:
            raise UserError(f"tabular.label: {label.name} is {label.smallest:g} in all rows")
        return
    count = len(label.categories)
    if count < 2:
        raise UserError(f"tabular.label: {label.name} is {label.categories[0]} in all rows")
    if count > _MOST_CLASSES:
        raise UserError(
            f"tabular.label: {label.name} has {count:,} classes, more than {_MOST_CLASSES:,}; "
            "tabular.objective regression predicts numbers"
        )


def _labeled(which: str, rows: Rows, label: Column | None, notes: list[str]) -> Rows:
    """Drop the rows without a label."""
    if label is None:
        return rows
    known = ~rows.labels.isnan()
    missing = len(known) - int(known.sum())
    if missing:
        notes.append(
            f"{missing:,} of {len(known):,} {which} rows have no {label.name} and are omitted"
        )
    return rows.take(known)


def _some(rows: Rows, count: int) -> Rows:
    """Select `count` rows, in random order."""
    length = len(rows.labels)
    places = np.arange(count, dtype=np.int64)
    order = permute(places, length, _SEED, epoch=0) if length else places
    return rows.take(torch.from_numpy(order))


def _notes(columns: Columns, unseen: tuple[Counter[str], Counter[str]]) -> list[str]:
    notes = []
    if columns.constant:
        notes.append(
            "not used, because they are constant in the training rows: "
            f"{', '.join(columns.constant)}"
        )
    for which, counts in zip(("training", "validation"), unseen, strict=True):
        found = [f"{count:,} of {name}" for name, count in counts.items() if count]
        if found:
            notes.append(
                "categories outside the vocabulary, because they are rare or new, count as "
                f"unseen: in the {which} rows {', '.join(found)}"
            )
    return notes


def class_names(columns: Columns) -> list[str]:
    """Class names of the label; empty for a number."""
    label = columns.label
    return classes(label) if label is not None and label.kind == "category" else []
