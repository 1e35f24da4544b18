"""Memory in which the gradients of a bucket lie one behind the other.

Horovod (patch 0024) sums them there. Elsewhere it copies them into a buffer and out of it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class BucketMemory:
    """As many bytes as the gradients; a rank with several passes has them twice in the last one.

    Args:
        groups: the buckets, each of one dtype and on one device.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._place_of: dict[nn.Parameter, tuple[Tensor, tuple[int, ...], int]] = {}
        for group in groups:
            bucket = torch.empty(sum(p.numel() for p in group), dtype=group[0].dtype)
            offset = 0
            for parameter in group:
                strides = torch.empty_like(parameter).stride()  # without the gaps that some have
                self._place_of[parameter] = bucket, strides, offset
                offset += parameter.numel()

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """The sum of `parameter.grad` and the last pass's gradient, which becomes the new grad.

        It is rounded as autograd's own sum.
        """
        bucket, strides, offset = self._place_of[parameter]
        # Not kept: autograd makes a tensor that nobody else has the grad, and copies any other.
        place = bucket.as_strided(parameter.shape, strides, offset)
        if parameter.grad is None:
            return place.copy_(gradient)
        torch.add(parameter.grad, gradient, out=place)
        parameter.grad = None
        return place
