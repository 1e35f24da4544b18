"""A small vision transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Half as deep as DeiT-Ti (Touvron et al., 2020), with the same width and heads.
LAYERS, WIDTH, HEADS = 6, 192, 3


class VisionTransformer(nn.Module):
    """Images to class scores: patches, a pre-norm encoder, the mean of its tokens.

    Args:
        size: side of the images.
        patch: side of a patch, divides `size`.
        channels: of the images.
        classes: number of scores.
    """

    def __init__(self, size: int, patch: int, channels: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(channels, WIDTH, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2, WIDTH))
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(LAYERS)
        )  # fmt: skip
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Args: images: (N, channels, size, size) float. Returns: (N, classes)."""
        tokens = self.embed(images)
        for layer in self.layers:
            tokens = self.apply_block(layer, tokens, images)
        return self.output(tokens, images)

    # Modules of the pipeline stages, see parallel/cut.py.
    first_stage = ("embedding", "positions")
    last_stage = ("norm", "head")

    def embed(self, images: Tensor) -> Tensor:
        """Input of the first layer: (N, patches, WIDTH)."""
        tokens: Tensor = self.embedding(images)
        return tokens.flatten(2).transpose(1, 2) + self.positions

    def apply_block(self, block: nn.Module, tokens: Tensor, images: Tensor) -> Tensor:
        """Apply one of `layers`."""
        found: Tensor = block(tokens)
        return found

    def output(self, tokens: Tensor, images: Tensor) -> Tensor:
        """Class scores: (N, classes)."""
        scores: Tensor = self.head(self.norm(tokens.mean(dim=1)))
        return scores
