"""Tables: classification, regression, and pretraining by prediction of hidden cells."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from hvdtrain.tasks import Datasets
from hvdtrain.tasks.tabular_config import TabularConfig, TabularTaskConfig

if TYPE_CHECKING:
    from torch import Tensor

    from hvdtrain.models.tabgpt import TabGPT
    from hvdtrain.tasks.tabular_data import TabularData

_SHOWN = 10


class Tabular:
    """Tables: classification, regression, and prediction of hidden cells."""

    Config = TabularTaskConfig
    units = ("rows", 1)
    defaults: ClassVar[dict[str, Any]] = {
        "batch.global_size": 256,
        "batch.micro_size": 128,
        "train.duration": 300,
        "eval.every": 100,
        "eval.batches": 100_000,
        "optim.lr": 1e-3,
        "schedule.warmup_steps": 50,
    }

    def __init__(self, config: TabularTaskConfig) -> None:
        self.config: TabularConfig = config.tabular
        self._whole = config
        self.metrics = () if self.config.objective == "regression" else ("accuracy",)
        self.measures: Callable[[Tensor], dict[str, float]] | None = None
        self._data: TabularData | None = None
        self._classes: list[str] = []

    def datasets(self) -> Datasets:
        from torch.utils.data import TensorDataset

        from hvdtrain.tasks.tabular_data import class_names, load

        data = self._data = load(self._whole)
        self._classes = class_names(data.columns)
        if self.config.objective == "regression":
            self.measures = of_numbers
        elif len(self._classes) == 2:
            self.measures = of_classes
        digest = hashlib.sha256(data.train.fingerprint() + data.columns.to_json().encode())
        return Datasets(
            TensorDataset(*data.train),
            TensorDataset(*data.validation),
            digest.hexdigest(),
            data.notes,
        )

    def model(self) -> TabGPT:
        from hvdtrain.data.table_encoding import sizes
        from hvdtrain.models.tabgpt import TabGPT, TableShape
        from hvdtrain.tasks.tabular_data import buffers

        assert self._data is not None
        config, columns = self.config, self._data.columns
        shape = TableShape(config.layers, config.width, config.heads, config.dropout)
        outputs = {"classification": max(len(self._classes), 2), "regression": 1}
        count = outputs.get(config.objective, 0)
        return TabGPT(sizes(columns.features), shape, count, buffers(columns))

    def loss(self, model: TabGPT, batch: list[Tensor]) -> dict[str, Any]:
        """Args:
            batch: codes, fractions and labels of N rows, see data/table_encoding.py.

        Returns:
            "loss"; "accuracy": (number of correct classes or hidden cells, total number); in
            evaluation "rows": a score or predicted number, and the label, per row (N, 2).
        """
        codes, fractions, labels = batch
        if self.config.objective == "pretraining":
            return self._guess(model, codes, fractions)
        scores = model.predict(codes, fractions).float()
        if self.config.objective == "regression":
            return self._number(scores[:, 0], labels)
        return self._class(scores, labels)

    def _class(self, scores: Tensor, labels: Tensor) -> dict[str, Any]:
        import torch
        from torch.nn.functional import cross_entropy

        classes = labels.long()
        right = (scores.detach().argmax(1) == classes).sum()
        found = {"loss": cross_entropy(scores, classes), "accuracy": (right, len(labels))}
        if self.measures is not None:
            found["rows"] = torch.stack(((scores[:, 1] - scores[:, 0]).double(), labels), dim=1)
        return found

    def _number(self, scores: Tensor, labels: Tensor) -> dict[str, Any]:
        """The loss is the squared error in units of the labels' variance."""
        import torch
        from torch.nn.functional import mse_loss

        assert self._data is not None and self._data.columns.label is not None
        label = self._data.columns.label
        scaled = ((labels - label.mean) / label.deviation).to(scores.dtype)
        predicted = scores.detach().double() * label.deviation + label.mean
        return {"loss": mse_loss(scores, scaled), "rows": torch.stack((predicted, labels), dim=1)}

    def _guess(self, model: TabGPT, codes: Tensor, fractions: Tensor) -> dict[str, Any]:
        """Loss of hidden cells; the target of a number is its nearest edge."""
        import torch
        from torch.nn.functional import cross_entropy

        from hvdtrain.data.table_encoding import HIDDEN, offsets
        from hvdtrain.runtime.device import sent

        assert self._data is not None
        device = codes.device
        first = sent(torch.tensor(offsets(self._data.columns.features)), device)
        # Drawn on the CPU, which then knows the hidden rows without waiting for a GPU.
        drawn = torch.rand(fractions.shape) < self.config.mask
        hidden = sent(drawn, device)
        rows_of = sent(drawn.T.nonzero()[:, 1], device).split(drawn.sum(dim=0).tolist())
        seen = torch.where(hidden, (first + HIDDEN).to(codes.dtype), codes)
        cells = model(seen, fractions.masked_fill(hidden, 0.0))[:, 1:]
        targets = codes.long() - first + (fractions >= 0.5)
        loss = right = torch.zeros((), device=device)
        for column, rows in enumerate(rows_of):
            scores = model.scores_of_codes(cells[rows, column], column).float()
            wanted = targets[rows, column]
            loss = loss + cross_entropy(scores, wanted, reduction="sum")
            right = right + (scores.detach().argmax(1) == wanted).sum()
        count = hidden.sum()
        return {"loss": (loss, count), "accuracy": (right, count)}

    def sample(self, model: TabGPT) -> str | None:
        """Labels and predictions of the first validation rows."""
        import torch

        assert self._data is not None
        label = self._data.columns.label
        if label is None:
            return None
        device = next(model.parameters()).device
        codes, fractions, labels = (t[:_SHOWN].to(device) for t in self._data.validation)
        with torch.no_grad():
            scores = model.predict(codes, fractions).double()
        if self._classes:
            predictions = [self._classes[number] for number in scores.argmax(1).tolist()]
            actual = [self._classes[int(number)] for number in labels.tolist()]
        else:
            predictions = [f"{x * label.deviation + label.mean:.4g}" for x in scores[:, 0].tolist()]
            actual = [f"{x:.4g}" for x in labels.tolist()]
        return ", ".join(
            f"{label.name} {real} predicted as {guess}"
            for real, guess in zip(actual, predictions, strict=True)
        )


# --- metrics over all rows, which are not means of micro-batches' metrics -----


def of_classes(rows: Tensor) -> dict[str, float]:
    """The area under the ROC curve: how often a row of class 1 scores higher than one of class 0.

    Args:
        rows: (N, 2) float64: a score, and the class.

    Returns:
        "auc"; equal scores count half (Mann and Whitney, 1947). Empty if one class is missing.
    """
    import numpy as np

    scores, labels = rows.numpy().T
    positive = labels > 0.5
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return {}
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[places]
    above = ranks[positive].sum() - ones * (ones + 1) / 2
    return {"auc": float(above / ones / zeros)}


def of_numbers(rows: Tensor) -> dict[str, float]:
    """The root mean squared error, and the explained fraction of the variance.

    Args:
        rows: (N, 2) float64: the prediction, and the actual value.

    Returns:
        "rmse" and "r2"; without "r2" if all rows have the same value.
    """
    import numpy as np

    predicted, actual = rows.numpy().T
    squared = float(np.square(predicted - actual).sum())
    spread = float(np.square(actual - actual.mean()).sum())
    found = {"rmse": float(np.sqrt(squared / len(actual)))}
    return found | ({"r2": 1 - squared / spread} if spread else {})
