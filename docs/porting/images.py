"""Stands in for torchvision: a small residual network, and generated images."""

import uuid
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.layers(x))


def resnet(classes=4, width=8):
    stem = nn.Conv2d(3, width, 3, padding=1)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return nn.Sequential(stem, Block(width), nn.MaxPool2d(2), Block(width), *head)


class ImageFolder(Dataset):
    """Images of DIRECTORY/CLASS/*.pt, which are generated on first use: stripes and noise."""

    def __init__(self, directory, classes=4, per_class=48):
        self.files = []
        for label in range(classes):
            for number in range(per_class):
                file = Path(directory) / f"{label}" / f"{number}.pt"
                self.files.append((file, label))
                if not file.exists():
                    self._generate(file, label, number)

    def _generate(self, file, label, number):
        generator = torch.Generator().manual_seed(1000 * label + number)
        wave = torch.sin(torch.arange(12.0) * (label + 1) / 2).expand(3, 12, 12)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{number}.{uuid.uuid4()}.part")
        torch.save(wave + 0.5 * torch.randn(3, 12, 12, generator=generator), part)
        part.rename(file)  # other ranks generate the same files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file, label = self.files[index]
        return torch.load(file), label
