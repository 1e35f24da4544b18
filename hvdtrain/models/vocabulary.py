"""The loss over a vocabulary, also where ranks split the vocabulary between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Fewer logits are not worth it: 16 MiB of them.
_MANY = 1 << 22
_PIECES = 4


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, a plain scalar.

    Args:
        logits: (..., vocabulary); with tensor parallelism a DTensor split by vocabulary, which
            is not gathered: ranks exchange a few numbers a token. The memory of many is used
            again: they are not to be read afterwards.
        targets: (...), int64, the same on all ranks.
    """
    logits, targets = logits.flatten(0, -2), targets.flatten()
    if _is_dtensor(logits):
        return _SplitCrossEntropy.apply(logits, targets)
    if logits.numel() < _MANY:
        return F.cross_entropy(logits, targets)
    if torch.is_autocast_enabled(logits.device.type):
        logits = logits.float()  # as torch's own does there
    return _CrossEntropyInPlace.apply(logits, targets)


def whole(x: Tensor) -> Tensor:
    """`x` as a plain tensor of its full shape: of what leaves a model that ranks split, such as
    logits or a stage's activations. All these ranks have to call it. A plain tensor stays as is.
    """
    return x.full_tensor() if _is_dtensor(x) else x  # type: ignore[attr-defined]


def _is_dtensor(x: Tensor) -> bool:
    """By its look: the import of DTensor costs a second."""
    return hasattr(x, "device_mesh")


class _CrossEntropyInPlace(torch.autograd.Function):
    """F.cross_entropy to the bit, with one tensor of the logits' size where that takes three:
    log-probabilities, and then the gradient, take the place of the logits, a part of the rows at a
    time. Both are torch's own functions, which compute each row for itself.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        probabilities, rows = logits.detach(), targets.unsqueeze(1)
        for part in _parts(probabilities):
            part.copy_(torch.log_softmax(part, 1))
        ctx.probabilities, ctx.rows = probabilities, rows
        return F.nll_loss(probabilities.gather(1, rows), torch.zeros_like(targets))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        if ctx.probabilities is None:
            raise RuntimeError("the loss was differentiated before: its logits are gone")
        gradient, ctx.probabilities = ctx.probabilities, None
        each = -upstream / len(ctx.rows)
        for part, rows in zip(_parts(gradient), _parts(ctx.rows), strict=True):
            of_loss = torch.zeros_like(part).scatter_(1, rows, each.to(part.dtype).expand_as(rows))
            # Private: autograd's own backward of log_softmax, here for some rows at a time. If it
            # changes, gradients may: test_torch_private.py and test_cross_entropy.py notice.
            part.copy_(torch._log_softmax_backward_data(of_loss, part, 1, part.dtype))
        return gradient, None


def _parts(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(-(-len(rows) // _PIECES))


class _SplitCrossEntropy(torch.autograd.Function):
    """Torch's loss_parallel is a state of the whole process that backward needs too: here it lasts
    for the forward pass, which computes the gradient with the loss.
    """

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Tensor) -> Tensor:
        from torch.distributed.tensor.parallel import loss_parallel

        if not ctx.needs_input_grad[0]:
            with loss_parallel():
                loss: Any = F.cross_entropy(logits.detach(), targets)
            return loss.to_local()
        with torch.enable_grad(), loss_parallel():
            leaf = logits.detach().requires_grad_()
            loss = F.cross_entropy(leaf, targets)
            (gradient,) = torch.autograd.grad(loss, leaf)
        ctx.layout = gradient.device_mesh, gradient.placements, gradient.shape, gradient.stride()
        ctx.save_for_backward(gradient.to_local())
        return loss.detach().to_local()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None]:
        from torch.distributed.tensor import DTensor

        (gradient,) = ctx.saved_tensors
        mesh, placements, shape, stride = ctx.layout
        scaled = gradient * upstream[0]
        whole = DTensor.from_local(
            scaled, mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return whole, None
