"""Top-k compression: only a gradient's largest elements are sent; the rest is the residual.

Lin et al., "Deep gradient compression", arXiv:1712.01887 (without its momentum correction), and
Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes",
arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.exchange.bucketed import BucketedExchange, flat_views
from hvdtrain.exchange.residuals import Residuals
from hvdtrain.runtime.collectives import begin_gather, completed
from hvdtrain.runtime.state_part import StatePart


def topk_exchange(
    optimizer: Optimizer, model: nn.Module, ratio: float, error_feedback: bool
) -> BucketedExchange:
    """Send, from each bucket, the elements of this rank's sum that are largest by magnitude.

    They are sent as indices and values (8 bytes per float32 element) by an all-gather, and every
    rank adds the contributions of all ranks in the order of the ranks, so results are bitwise
    identical. The result depends on the number of ranks by design.

    Args:
        ratio: fraction of the elements that are sent, in (0, 1].
        error_feedback: elements that were not sent are added to the next step's sum.
    """

    def make(number: int, parameters: Sequence[nn.Parameter]) -> _Bucket:
        return _Bucket(f"topk.{number}", parameters, ratio, error_feedback)

    def parts(buckets: Sequence[_Bucket]) -> list[StatePart]:
        return [Residuals([bucket.residual for bucket in buckets])] if error_feedback else []

    return BucketedExchange(optimizer, model, make, parts)


class _Bucket:
    """See bucketed.Bucket.

    Args:
        name: of the bucket's all-gather.

    Attributes:
        residual: float32 or float64 (n,): error feedback; it changes when a step is committed.
    """

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], ratio: float, error_feedback: bool
    ) -> None:
        numel, device = sum(p.numel() for p in parameters), parameters[0].device
        wide = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
        self._name = name
        self._count = max(1, round(ratio * numel))
        self._error_feedback = error_feedback
        self.residual = torch.zeros(numel, dtype=wide, device=device)
        self._sum = torch.zeros_like(self.residual)
        self._gradient = torch.zeros_like(self.residual)
        self._sum_of = flat_views(self._sum, parameters)
        self._gradient_of = flat_views(self._gradient, parameters)
        self._sent = torch.empty(0)  # 1 x bytes: indices, then values
        self._handle: int | None = None

    def begin(self) -> None:
        self._sum.copy_(self.residual)
        self._handle = None

    @torch.no_grad()
    def arrived(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self._sum_of[parameter].add_(gradient)

    def send(self, several: bool) -> None:
        """Move the sent elements out of the sum: the remainder is the residual."""
        indices = self._sum.abs().topk(self._count, sorted=False).indices
        values = self._sum[indices]
        self._sum[indices] = 0.0
        packed = (indices.to(torch.int32).view(torch.uint8), values.view(torch.uint8))
        self._sent = torch.cat(packed).unsqueeze(0)
        if several:
            self._handle = begin_gather(self._sent, self._name)

    def receive(self) -> int:
        table = self._sent if self._handle is None else completed(self._handle)
        self._gradient.zero_()
        for row in table:  # sequentially: the order of the additions is identical on all ranks
            indices = row[: 4 * self._count].clone().view(torch.int32).long()
            values = row[4 * self._count :].clone().view(self._gradient.dtype)
            self._gradient[indices] += values
        for parameter, view in self._gradient_of.items():
            parameter.grad = view.to(parameter.dtype)
        return self._sent.nbytes

    def commit(self, applied: bool) -> None:
        # A skipped step changes nothing: the residual stays as it was.
        if applied and self._error_feedback:
            self.residual.copy_(self._sum)
