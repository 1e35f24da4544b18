"""The loss over a vocabulary, including a vocabulary that is split between ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# In-place computation is not worth it for fewer logits: 16 MiB of float32.
_MANY = 1 << 22
_PIECES = 4


def cross_entropy(logits: Tensor, targets: Tensor, each: Tensor | None = None) -> Tensor:
    """Mean cross-entropy in nats, a plain scalar.

    Args:
        logits: (..., vocabulary); with tensor parallelism a DTensor split by vocabulary, which
            is not gathered: ranks exchange a few numbers per token. If the logits are many, their
            memory is reused: do not read them afterwards.
        targets: (...), int64, the same on all ranks.
        each: (...), receives the cross-entropy of each target, without a gradient.
    """
    logits, targets = logits.flatten(0, -2), targets.flatten()
    if _is_dtensor(logits):
        return _SplitCrossEntropy.apply(logits, targets, each)
    if logits.numel() < _MANY:
        if each is None:
            return F.cross_entropy(logits, targets)
        losses = F.cross_entropy(logits, targets, reduction="none")
        each.copy_(losses.detach().view_as(each))
        return losses.mean()
    device = logits.device.type  # may be "meta", to count FLOPs
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        logits = logits.float()  # as torch's cross_entropy does under autocast
    return _CrossEntropyInPlace.apply(logits, targets, each)


def whole(x: Tensor) -> Tensor:
    """Gather `x`, such as a split model's logits or a stage's activations, to a plain tensor of
    full shape. All ranks that share `x` must call this. A plain tensor is returned unchanged.
    """
    return x.full_tensor() if _is_dtensor(x) else x  # type: ignore[attr-defined]


def _is_dtensor(x: Tensor) -> bool:
    """Check for an attribute, because importing DTensor takes a second."""
    return hasattr(x, "device_mesh")


class _CrossEntropyInPlace(torch.autograd.Function):
    """Bitwise identical to F.cross_entropy, with one tensor of the logits' size instead of three.

    Log-probabilities, and then the gradient, replace the logits in place, a part of the rows at a
    time. Both use torch's functions, which compute each row independently.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, each: Tensor | None) -> Tensor:
        probabilities, rows = logits.detach(), targets.unsqueeze(1)
        for part in _parts(probabilities):
            part.copy_(torch.log_softmax(part, 1))
        ctx.probabilities, ctx.rows = probabilities, rows
        found = probabilities.gather(1, rows)
        if each is not None:
            each.copy_(found.view_as(each)).neg_()
        return F.nll_loss(found, torch.zeros_like(targets))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        if ctx.probabilities is None:
            raise RuntimeError("the loss was differentiated before: its logits are gone")
        gradient, ctx.probabilities = ctx.probabilities, None
        each = -upstream / len(ctx.rows)
        for part, rows in zip(_parts(gradient), _parts(ctx.rows), strict=True):
            of_loss = torch.zeros_like(part).scatter_(1, rows, each.to(part.dtype).expand_as(rows))
            # Private: autograd's backward of log_softmax, here for some rows at a time. If it
            # changes, gradients may change: test_torch_private.py and test_cross_entropy.py fail.
            part.copy_(torch._log_softmax_backward_data(of_loss, part, 1, part.dtype))
        return gradient, None, None


def _parts(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(-(-len(rows) // _PIECES))


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits split by vocabulary, with the gradient computed in the forward pass.

    torch's loss_parallel is process-wide state that the backward pass would need too; here it is
    active only during the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Tensor, each: Tensor | None) -> Tensor:
        from torch.distributed.tensor.parallel import loss_parallel

        if each is not None:
            with loss_parallel():
                losses: Any = F.cross_entropy(logits.detach(), targets, reduction="none")
            each.copy_(losses.to_local().view_as(each))
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
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None, None]:
        from torch.distributed.tensor import DTensor

        (gradient,) = ctx.saved_tensors
        mesh, placements, shape, stride = ctx.layout
        scaled = gradient * upstream[0]
        whole = DTensor.from_local(
            scaled, mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return whole, None, None
