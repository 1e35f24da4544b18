"""That a step is taken by all ranks or by none, where each holds a part of the model."""

from __future__ import annotations

import torch

from hvdtrain.runtime.collectives import sum_


class Agreement:
    """Waits before a step until every rank has the gradients of it.

    Then no rank can be a step ahead of another that could not follow: one that did not hear that
    all are ready keeps its gradients, and takes the step when it meets a rank that did.

    Attributes:
        pending: whether the step that some rank may have taken, and this one not, changes the
            parameters; None: there is no such step.
    """

    def __init__(self) -> None:
        self.pending: bool | None = None

    def __call__(self, applied: bool) -> None:
        """Args: applied: the gradients are finite: the step changes the parameters.

        Raises:
            RankLostError: another rank is gone.
        """
        self.pending = applied
        sum_(torch.zeros(1), "step.agree")
        self.pending = None
