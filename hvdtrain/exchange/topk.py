"""Top-k compression: only a gradient's largest elements are sent; the rest is the residual.

Lin et al., "Deep gradient compression", arXiv:1712.01887 (without its momentum correction), and
Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes",
arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.exchange.base import TrainedParameters, gradient_buckets
from hvdtrain.exchange.bucketed import Bucket, BucketedExchange, flat_views, set_gradients
from hvdtrain.runtime.collectives import begin_gather, completed


def topk_exchange(optimizer: Optimizer, model: nn.Module, ratio: float) -> BucketedExchange:
    """Send, from each bucket, the elements of this rank's sum that are largest by magnitude.

    Elements that are not sent are added to the next step's sum.

    They are sent as indices and values (8 bytes per float32 element) by an all-gather, and every
    rank adds the contributions of all ranks in the order of the ranks, so results are bitwise
    identical. The result depends on the number of ranks by design.

    Args:
        ratio: fraction of the elements that are sent, in (0, 1].
    """

    trained = TrainedParameters(optimizer, model)
    groups = gradient_buckets(trained.in_order)
    buckets = [TopKBucket(f"topk.{number}", group, ratio) for number, group in enumerate(groups)]
    return BucketedExchange(trained, buckets)


class TopKBucket(Bucket):
    """Bucket of which the largest elements are sent, by an all-gather."""

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], ratio: float) -> None:
        super().__init__(name, parameters, error_feedback=True)
        self._count = max(1, round(ratio * len(self.flat)))
        self._gradient = torch.zeros_like(self.flat)
        self._gradient_of = flat_views(self._gradient, parameters)
        self._sent = torch.empty(0)  # 1 x bytes: indices, then values

    def send(self, alone: bool) -> None:
        """Move the sent elements out of the sum: the remainder is the residual."""
        indices = self.flat.abs().topk(self._count, sorted=False).indices
        values = self.flat[indices]
        self.flat[indices] = 0.0
        packed = (indices.to(torch.int32).view(torch.uint8), values.view(torch.uint8))
        self._sent = torch.cat(packed).unsqueeze(0)
        if not alone:
            self.handle = begin_gather(self._sent, self.name)

    def receive(self) -> int:
        table = self._sent if self.handle is None else completed(self.handle)
        self._gradient.zero_()
        for row in table:  # sequentially: the order of the additions is identical on all ranks
            indices = row[: 4 * self._count].clone().view(torch.int32).long()
            values = row[4 * self._count :].clone().view(self._gradient.dtype)
            self._gradient[indices] += values
        set_gradients(self._gradient_of)
        return self._sent.nbytes
