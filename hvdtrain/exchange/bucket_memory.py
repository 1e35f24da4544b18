"""Contiguous memory for the gradients of a bucket.

Horovod (patch 0024) sums gradients in place there. Gradients elsewhere are copied into a buffer and
back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class BucketMemory:
    """Memory of the gradients' size; with several passes, the last one holds gradients twice.

    Args:
        groups: the buckets, each of one dtype and on one device.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._place_of: dict[nn.Parameter, tuple[Tensor, tuple[int, ...], int]] = {}
        for group in groups:
            bucket = torch.empty(sum(p.numel() for p in group), dtype=group[0].dtype)
            offset = 0
            for parameter in group:
                strides = torch.empty_like(parameter).stride()  # dense, without gaps
                self._place_of[parameter] = bucket, strides, offset
                offset += parameter.numel()

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Return `parameter.grad` plus the last pass's gradient, which becomes the new grad.

        It is rounded like autograd's own sum.
        """
        bucket, strides, offset = self._place_of[parameter]
        # Not stored: autograd uses a tensor as the grad if it has no other reference, else a copy.
        place = bucket.as_strided(parameter.shape, strides, offset)
        if parameter.grad is None:
            return place.copy_(gradient)
        torch.add(parameter.grad, gradient, out=place)
        parameter.grad = None
        return place
