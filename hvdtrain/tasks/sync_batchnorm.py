"""BatchNorm over the micro-batches of all ranks, on CPUs and GPUs, with sums by all-reduce.

Ioffe and Szegedy, arXiv:1502.03167, over the global batch. The gradient includes the means and
variances, as if one process had the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

# Private: the base of torch's BatchNorm layers, without a public name. If it is removed, this
# import fails; tests/single/test_torch_private.py fails if a layer no longer derives from it.
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain import comm
from hvdtrain.comm.process import COLLECTIVES
from hvdtrain.errors import CollectiveError
from hvdtrain.runtime.device import widened


class SyncBatchNorm(_BatchNorm):
    """Replacement of a BatchNorm that keeps its parameters and statistics.

    In eval mode it behaves like the BatchNorm. In train mode all ranks must call it in the same
    way. In training, each rank must have exactly one micro-batch per step: only then are all
    samples of the global batch processed at the same time.

    Args:
        replaced: with parameters, running statistics and a momentum.
        name: name of the layer in its model, the same on all ranks.

    Raises:
        CollectiveError: in train mode, ranks have no or several micro-batches in a step.
    """

    def __init__(self, replaced: _BatchNorm, name: str) -> None:
        super().__init__(replaced.num_features, replaced.eps, replaced.momentum)
        self.weight, self.bias = replaced.weight, replaced.bias
        for buffer, value in replaced.named_buffers():
            setattr(self, buffer, value)
        self.training = replaced.training
        self._name = f"batchnorm.{name}"

    def _check_input_dim(self, input: Tensor) -> None:  # called by torch
        pass

    def forward(self, x: Tensor) -> Tensor:
        """Args: x: (N, features, ...) float, of one shape on all ranks. Returns: the same shape."""
        if not self.training:
            return super().forward(x)
        _check_micro_batches()
        normalized, mean, var, count = _Normalize.apply(x, self.eps, self._name)
        with torch.no_grad():
            assert self.num_batches_tracked is not None
            assert self.running_mean is not None and self.running_var is not None
            assert self.momentum is not None
            self.num_batches_tracked.add_(1)
            # The unbiased estimate of the variance, as in torch.
            unbiased = var * (count / max(count - 1, 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        shape = (1, -1, *[1] * (x.dim() - 2))
        scaled: Tensor = normalized * self.weight.view(shape) + self.bias.view(shape)
        return scaled.to(x.dtype)


def synchronize(model: nn.Module) -> int:
    """Replace each BatchNorm of a model; return the number of replaced layers."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    for name, module in found:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, SyncBatchNorm(module, name))
    return len(found)


def _check_micro_batches() -> None:
    if COLLECTIVES.counts is None or COLLECTIVES.counts == (1, 1):
        return
    fewest, most = COLLECTIVES.counts
    each = f"{most}" if fewest == most else f"{fewest} to {most}"
    raise CollectiveError(
        "image.sync_batchnorm: statistics of the global batch require exactly one micro-batch per "
        f"step on each rank, not {each}: set batch.micro_size to batch.global_size / the world size"
    )


class _Normalize(Function):
    """x -> (x - mean) / sqrt(var + eps), with mean and variance over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, name: str) -> tuple[Tensor, Tensor, Tensor, float]:
        axes = [0, *range(2, x.dim())]
        wide = widened(x)
        var, mean = torch.var_mean(wide, axes, correction=0)
        count = x.numel() // x.shape[1]
        # float64 avoids the loss of precision in E[x^2] - E[x]^2.
        mean, var = mean.double(), var.double()
        own = torch.cat((mean, var + mean.square())) * count
        sums = comm.all_reduce(own, name=name)
        total = float(count * comm.size())
        mean, square = (sums / total).chunk(2)
        var = (square - mean.square()).clamp_(min=0)
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = (var + eps).rsqrt()
        normalized = (wide - mean.to(wide.dtype).view(shape)) * scale.to(wide.dtype).view(shape)
        ctx.save_for_backward(normalized, scale)
        ctx.axes, ctx.shape, ctx.total, ctx.name, ctx.dtype = axes, shape, total, name, x.dtype
        ctx.mark_non_differentiable(mean, var)
        return normalized, mean, var, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        normalized, scale = ctx.saved_tensors
        axes, shape = ctx.axes, ctx.shape
        own = torch.cat((grad.sum(axes), (grad * normalized).sum(axes))).double()
        sums = comm.all_reduce(own, name=f"{ctx.name}.backward") / ctx.total
        mean, along = (part.to(grad.dtype).view(shape) for part in sums.chunk(2))
        inner = grad - mean - normalized * along
        return (inner * scale.to(grad.dtype).view(shape)).to(ctx.dtype), None, None
