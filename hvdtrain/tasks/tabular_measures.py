"""Metrics over all rows, not averages of averages."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def of_classes(rows: Tensor) -> dict[str, float]:
    """The area under the ROC curve: how often a row of class 1 scores higher than one of class 0.

    Args:
        rows: (N, 2) float64: a score, and the class.

    Returns:
        "auc"; equal scores count half (Mann and Whitney, 1947). Empty if one class is missing.
    """
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
    """The root mean squared error, and the explained share of the variance.

    Args:
        rows: (N, 2) float64: the prediction, and the actual value.

    Returns:
        "rmse" and "r2"; without "r2" if all rows have the same value.
    """
    predicted, actual = rows.numpy().T
    squared = float(np.square(predicted - actual).sum())
    spread = float(np.square(actual - actual.mean()).sum())
    found = {"rmse": float(np.sqrt(squared / len(actual)))}
    return found | ({"r2": 1 - squared / spread} if spread else {})
