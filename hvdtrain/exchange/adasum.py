"""Adasum: similar gradients of two ranks are averaged, orthogonal ones are added.

Maleki et al., "Scaling distributed training with adaptive summation", arXiv:2006.02924.
"""

from __future__ import annotations

from collections.abc import Sequence

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.exchange.bucketed import BucketedExchange, flat_views
from hvdtrain.runtime.collectives import begin_adasum, completed


def adasum_exchange(optimizer: Optimizer, model: nn.Module) -> BucketedExchange:
    """Combine the ranks' gradients pairwise with Horovod's Adasum.

    Gradients a and b of a parameter become (1 - ab / 2aa) a + (1 - ab / 2bb) b, then two such
    results are combined, and so on. Horovod implements this over MPI for a power of two of ranks.

    Each rank contributes the mean over its own micro-batches; all ranks have equally many.
    Gradients are combined, not optimizer updates as in hvd.DistributedOptimizer(op=hvd.Adasum):
    optimizer moments stay identical on all ranks, so any rank can save and transfer the state. The
    result depends on the number of ranks by design.
    """

    def make(number: int, parameters: Sequence[nn.Parameter]) -> _Bucket:
        return _Bucket(f"adasum.{number}", parameters)

    return BucketedExchange(optimizer, model, make)


class _Bucket:
    """See bucketed.Bucket.

    Args:
        name: of the bucket's all-reduce.
    """

    def __init__(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        sizes = [p.numel() for p in parameters]
        wide = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
        self._name = name
        self._sum = torch.zeros(sum(sizes), dtype=wide, device=parameters[0].device)
        self._sum_of = flat_views(self._sum, parameters)
        self._vectors: tuple[Tensor, ...] = self._sum.split(sizes)
        self._handle: int | None = None

    def begin(self) -> None:
        self._sum.zero_()
        self._handle = None

    @torch.no_grad()
    def arrived(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self._sum_of[parameter].add_(gradient)

    def send(self, several: bool) -> None:
        if several:
            # The gradient was divided by the micro-batches of all ranks; make it this rank's mean.
            self._sum.mul_(hvd.size())
            self._handle = begin_adasum(self._vectors, self._name)

    def receive(self) -> int:
        if self._handle is not None:
            completed(self._handle)
        for parameter, view in self._sum_of.items():
            parameter.grad = view.to(parameter.dtype)
        return self._sum.nbytes

    def commit(self, applied: bool) -> None:
        """Nothing is kept from step to step."""
