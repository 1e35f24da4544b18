"""A regression whose data arrive late and whose evaluations take long; argument: seconds."""

import random
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import hvdtrain

SECONDS = float(sys.argv[1])
LATE, LONG = 6.0, 40.0  # a micro-batch has two rows
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
began = time.monotonic()


class SlowDisk(Dataset):
    """Rows that arrive up to 6 s late, now and then."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        # Not of the step's random numbers, which the ranks share.
        if random.SystemRandom().random() < 0.05:
            time.sleep(random.SystemRandom().uniform(0, LATE))
        return torch.full((4,), float(index % 7))


def validate():
    """Compute for 40 s."""
    end, total = time.monotonic() + LONG, torch.zeros(())
    while time.monotonic() < end:
        total = total + torch.randn(256, 256).mm(torch.randn(256, 256)).mean()
    return total


with hvdtrain.training(model, optimizer, SlowDisk()) as training:
    for step in training:
        with step:
            for rows in step:
                step.backward(model(rows).square().mean())
        if step.index % 60 == 30:
            training.log(step, validation_loss=training.evaluate(validate))
        if training.rank == 0 and time.monotonic() - began > SECONDS:
            training.finish()
