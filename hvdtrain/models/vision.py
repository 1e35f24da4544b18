"""Image classifiers: residual networks and a small vision transformer."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

# Residual networks (He et al., "Deep Residual Learning for Image Recognition", 2015). Parameters
# have the names and shapes of torchvision's, so weights can be exchanged. torchvision is not
# imported: each of its releases requires one release of torch, and would replace the torch that
# Horovod was compiled against.

# Images up to this side, in pixels, are not downsampled at first (section 4.2 of the paper).
SMALL_IMAGE = 64


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    expansion: ClassVar[int] = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        result: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return result


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 (with the stride, as in torchvision) and 1x1, with a shortcut."""

    expansion: ClassVar[int] = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        result: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return result


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class Shape(NamedTuple):
    """Architecture of a residual network: block type, blocks per stage, and first width."""

    block: type[BasicBlock] | type[Bottleneck]
    blocks: tuple[int, ...]
    width: int


SHAPES = {
    "resnet8": Shape(BasicBlock, (1, 1, 1), 16),  # n = 1 in section 4.2 of the paper
    "resnet18": Shape(BasicBlock, (2, 2, 2, 2), 64),
    "resnet50": Shape(Bottleneck, (3, 4, 6, 3), 64),
}


class ResNet(nn.Module):
    """Images to class scores.

    Args:
        name: key in `SHAPES`.
        size: side of the images; up to 64 pixels, the first convolution is 3x3 without stride and
            pooling; for larger images both are torchvision's.
        channels: number of channels of the images.
        classes: number of scores.
    """

    def __init__(self, name: str, size: int, channels: int, classes: int) -> None:
        super().__init__()
        block, blocks, width = SHAPES[name]
        small = size <= SMALL_IMAGE
        self.conv1 = _conv(channels, width, 3) if small else _conv(channels, width, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        inputs = width
        self._stages = []
        for number, count in enumerate(blocks):
            stage = []
            for index in range(count):
                stride = 2 if number > 0 and index == 0 else 1
                stage.append(block(inputs, width << number, stride))
                inputs = (width << number) * block.expansion
            self._stages.append(f"layer{number + 1}")
            self.add_module(self._stages[-1], nn.Sequential(*stage))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Args: images: (N, channels, size, size) float. Returns: (N, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in self._stages:
            x = getattr(self, stage)(x)
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


# Vision transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020).

# Half as deep as DeiT-Ti (Touvron et al., 2020), with the same width and heads.
LAYERS, WIDTH, HEADS = 6, 192, 3


class VisionTransformer(nn.Module):
    """Images to class scores: patches, a pre-norm encoder, the mean of its tokens.

    Args:
        size: side of the images.
        patch: side of a patch, divides `size`.
        channels: number of channels of the images.
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
