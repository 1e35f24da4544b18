"""Random changes of a micro-batch of images.

They draw from torch's generator of the CPU, as dropout does there: it is seeded for each
micro-batch, so that the same is drawn whichever rank works on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.data.images import Normalisation


def crop(images: Tensor, size: int, move: bool, flip: bool) -> Tensor:
    """Cuts a square out of each image.

    Args:
        images: (N, C, H, W), H and W at least `size`.
        size: side of the square.
        move: anywhere in the image, else out of its middle.
        flip: mirror it left to right, with probability 1/2.

    Returns:
        (N, C, size, size), same dtype and device.
    """
    count, _, height, width = images.shape
    room = torch.tensor([[height - size], [width - size]])
    drawn = torch.rand(2, count) if move else torch.full((2, count), 0.5)
    # 0.5 is the middle; rand() < 1, so the last place is as likely as any.
    top, left = (drawn * (room + 1)).long() if move else (room // 2).expand(2, count)
    rows = top[:, None] + torch.arange(size)
    columns = left[:, None] + torch.arange(size)
    if flip:
        mirrored = torch.rand(count) < 0.5
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    device = images.device
    sample = torch.arange(count, device=device)[:, None, None]
    cut = images[sample, :, rows.to(device)[:, :, None], columns.to(device)[:, None, :]]
    return cut.permute(0, 3, 1, 2).contiguous()


def normalise(images: Tensor, normalisation: Normalisation) -> Tensor:
    """Args: images: (N, C, H, W) uint8. Returns: float32 of mean 0 and deviation 1, about."""
    mean, std = (torch.tensor(values, device=images.device) for values in normalisation)
    return (images.float() / 255 - mean[:, None, None]) / std[:, None, None]


def mix(images: Tensor, alpha: float) -> tuple[Tensor, Tensor, float]:
    """Mixup (Zhang et al., arXiv:1710.09412): each image with another one of the micro-batch.

    Args:
        images: (N, C, H, W) float.
        alpha: > 0; shares are drawn from Beta(alpha, alpha), one for the micro-batch.

    Returns:
        The mixtures; int64 (N,), which image each was mixed with; the share of the image itself.
    """
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    other = torch.randperm(len(images)).to(images.device)
    return images.lerp(images[other], 1 - share), other, share
