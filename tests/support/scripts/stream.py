"""A script whose dataset has an order of its own, a new one in each epoch."""

from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset

import hvdtrain


class Stream(IterableDataset[torch.Tensor]):
    epoch = 0

    def __len__(self) -> int:
        return 40

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.epoch)
        for _ in range(40):
            yield torch.randn(4, generator=generator)


torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with hvdtrain.training(model, optimizer, Stream()) as training:
    for step in training:
        with step:
            for x in step:
                step.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
