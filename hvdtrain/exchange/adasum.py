"""Adasum: similar gradients of two ranks are averaged, orthogonal ones are added.

Maleki et al., "Scaling distributed training with adaptive summation", arXiv:2006.02924.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from hvdtrain.exchange.base import TrainedParameters, gradient_buckets
from hvdtrain.exchange.bucketed import Bucket, BucketedExchange, set_gradients
from hvdtrain.runtime.collectives import begin_adasum, completed
from hvdtrain.runtime.horovod import hvd


def adasum_exchange(optimizer: Optimizer, model: nn.Module) -> BucketedExchange:
    """Combine the ranks' gradients pairwise with Horovod's Adasum.

    Gradients a and b of a parameter become (1 - ab / 2aa) a + (1 - ab / 2bb) b, then two such
    results are combined, and so on. Horovod implements this over MPI for a power of two of ranks.

    Each rank contributes the mean over its own micro-batches; all ranks have equally many.
    Gradients are combined, not optimizer updates as in hvd.DistributedOptimizer(op=hvd.Adasum):
    optimizer moments stay identical on all ranks, so any rank can save and transfer the state. The
    result depends on the number of ranks by design.
    """

    trained = TrainedParameters(optimizer, model)
    groups = gradient_buckets(trained.in_order)
    buckets = [AdasumBucket(f"adasum.{number}", group) for number, group in enumerate(groups)]
    return BucketedExchange(trained, buckets)


class AdasumBucket(Bucket):
    """Bucket whose gradients Horovod combines, each parameter's as one vector."""

    def __init__(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(name, parameters)
        self._vectors = self.flat.split([p.numel() for p in parameters])

    def send(self, alone: bool) -> None:
        if not alone:
            # The gradient was divided by the micro-batches of all ranks; make it this rank's mean.
            self.flat.mul_(hvd.size())
            self.handle = begin_adasum(self._vectors, self.name)

    def receive(self) -> int:
        if self.handle is not None:
            completed(self.handle)
        set_gradients(self.view_of)
        return self.flat.nbytes
