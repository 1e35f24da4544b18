"""Random augmentation of a micro-batch of images.

Random numbers come from torch's CPU generator, like dropout on the CPU. It is seeded for each
micro-batch, so the result does not depend on the rank that processes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.data.images import Normalisation


def crop(images: Tensor, size: int, move: bool, flip: bool) -> Tensor:
    """Cut a square out of each image.

    Args:
        images: (N, C, H, W), H and W at least `size`.
        size: side of the square.
        move: cut at a random position, else from the middle.
        flip: mirror the image left to right with probability 1/2.

    Returns:
        (N, C, size, size), same dtype and device.
    """
    count, _, height, width = images.shape
    room = torch.tensor([[height - size], [width - size]])
    drawn = torch.rand(2, count) if move else torch.full((2, count), 0.5)
    # 0.5 is the middle; rand() < 1, so the last position is as likely as any other.
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
    """Args: images: (N, C, H, W) uint8. Returns: float32, mean about 0, deviation about 1."""
    mean, std = (torch.tensor(values, device=images.device) for values in normalisation)
    return (images.float() / 255 - mean[:, None, None]) / std[:, None, None]


def mix(images: Tensor, alpha: float) -> tuple[Tensor, Tensor, float]:
    """Mixup (Zhang et al., arXiv:1710.09412): mix each image with another of the micro-batch.

    Args:
        images: (N, C, H, W) float.
        alpha: > 0; one mixing coefficient per micro-batch is drawn from Beta(alpha, alpha).

    Returns:
        The mixtures; int64 (N,), the index of each image's partner; the weight of the image itself.
    """
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    other = torch.randperm(len(images)).to(images.device)
    return images.lerp(images[other], 1 - share), other, share
